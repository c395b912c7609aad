"""Find the lines that belong to an exception: its whole message, and the code that raised it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from homeostat.health.failures.frames import BOX
from homeostat.health.failures.lone_errors import MAX_PASTED
from homeostat.health.failures.speakers import speaker_in
from homeostat.health.failures.tracebacks import Traceback
from homeostat.health.log import Log

# Maximum number of lines after the exception's line that may continue its message, and of lines
# before it that may quote the code that raised.
_MAX_MORE = 12
_MAX_ABOVE = 4


def whole_message(failure: Traceback, log: Log) -> str:
    """Return the message with the following lines that belong to it."""
    return "\n".join((failure.message, *(text for _, text in _continued(failure, log))))


def end_of_message(failure: Traceback, log: Log) -> int:
    """Return the number of the last line that belongs to the exception's message."""
    return max(lines_of(failure, log))


def lines_of(failure: Traceback, log: Log) -> frozenset[int]:
    """Return the numbers of the lines from the exception's first one to the end of its message;
    below the exception's own line, what other processes print in between is left out.
    """
    more = (number for number, _ in _continued(failure, log))
    return frozenset((*range(failure.start.number, failure.end.number + 1), *more))


def _continued(failure: Traceback, log: Log) -> Iterator[tuple[int, str]]:
    """Yield the lines below the exception's own line that continue its message."""
    if failure.is_native or not failure.has_tail:
        return
    is_pasted = len(log.lines) <= MAX_PASTED
    start = bisect_right(log.lines, failure.end.number, key=lambda line: line.number)
    for line in log.lines[start : start + _MAX_MORE]:
        speaker, text = speaker_in(line.text)
        if speaker != failure.speaker:
            continue
        # Message lines that continue are indented (loaders of weights print them so) or begin in
        # the middle of a sentence (rich wraps them). In a pasted text of a few lines, all the rest
        # belongs to the error.
        is_more = is_pasted or text[:1].isspace() or text[:1].islower()
        if (
            not is_more
            or 'File "' in text
            or text.startswith(("Traceback", "Fatal Python error"))
            or text.strip()[:1] in BOX
        ):
            break
        yield line.number, text.strip()


def raising_code(failure: Traceback, log: Log) -> str:
    """Return the line of code that the traceback quotes last; "" if it quotes none."""
    if not failure.frames or failure.is_native:
        return ""
    end = bisect_left(log.lines, failure.end.number, key=lambda line: line.number)
    for line in reversed(log.lines[max(0, end - _MAX_ABOVE) : end]):
        speaker, text = speaker_in(line.text)
        if speaker != failure.speaker or not text.strip(" ^~"):
            continue
        return "" if 'File "' in text else text.strip()[:300]
    return ""
