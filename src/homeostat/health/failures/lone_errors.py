"""Read an error without a traceback at the end of a log: users paste those, and loggers print them.

    RuntimeError: CUDA error: invalid argument                              a line of its own
    LayerNorm error: TypeError: missing a required argument: 'num_warps'    named within a line
    ERROR abort() got an unexpected keyword argument 'pooling_output'       the message alone

The first form counts anywhere in the last lines of a log. The others count only in the very last
lines, because a run that continues also logs errors that it survived.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from homeostat.health.failures.details import details_of
from homeostat.health.failures.end_lines import error_at_end
from homeostat.health.failures.speakers import speaker_in
from homeostat.health.failures.tracebacks import (
    ERROR,
    EXCEPTION_NAME,
    IGNORED,
    LOGGER,
    MAX_BETWEEN,
    NO_CLASSES,
    Traceback,
    untangled,
)
from homeostat.health.log import LogLine

_VERY_LAST = 3
# A text with at most this many lines and no metric was probably pasted to ask about it.
MAX_PASTED = 30
_SAYS_WRONG = re.compile(
    r"\b(?:error|exception|fatal|fail(?:s|ed|ure)?|unable|invalid|unsupported|unexpected|mismatch"
    r"|undefined|denied|refused|timed out|crash(?:ed)?|abort(?:ed)?|missing|cannot|can't|could not"
    r"|couldn't|does not|doesn't|has no|no such|no module named|takes \d{1,3} positional"
    r"|multiple values|must(?: be| have| match)?|should(?: be| have| match)|only support(?:s|ed)?"
    r"|requires?|required|exceeds?|at (?:most|least)"
    r"|(?:larger|greater|longer|less|smaller|older) than"
    r"|too (?:long|large|small|many|old|new)|different from|no longer"
    r"|please|needs? to|unknown|duplicate|illegal|wrong|exhausted|degraded|corrupt(?:ed)?|died"
    r"|was detected|isn't|wasn't|aren't|NCCL WARN|\w{1,40}Error\w{1,40}|requested|attempted|assert"
    r"|tried to|gave up|killed|different loop|diverge[sd]?|gibberish|garbage|but (?:got|found|only)"
    r"|not (?:supported|found|compatible|implemented|available|installed|defined|enough|set"
    r"|possible|allowed|valid|initiali[sz]ed|recogni[sz]ed|loaded))\b",
    re.IGNORECASE,
)
# A quantity that is called an error, with its value: "Loss error: 0.47", "word error rate: 4.3 %".
# No words of a sentence may follow: "Error: 12.1 is not supported" is no quantity.
_MEASURED = re.compile(
    r"\b(?:error|mismatch)(?: rate)?\b[\s:=]{1,4}[-+]?"
    r"(?:\d{0,9}\.\d{1,20}(?:e[-+]?\d{1,3})?|\d{1,9}e[-+]?\d{1,3}|\d{1,9}(?=\s?%))\s?%?"
    r"(?=$|[,;|)\]}]|\s{1,40}(?:$|[|+\xb1]|[\w/@ ]{1,40}[:=]))",
    re.IGNORECASE,
)
# Log levels of lines that report no error, and the notice about a newer version.
_AT_EASE = re.compile(r"\b(?:INFO|DEBUG)\b|\bis available!| - switching to ")
_WARNS = re.compile(r"\b(?:WARN(?:ING)?|[Ww]arning|[A-Z][A-Za-z]{0,30}Warning)\b")
# NCCL logs its errors at this level, behind its own name or the place in its source.
_NCCL_WARNS = re.compile(r"(?:\bNCCL|\.(?:h|cc|cu):\d{1,6}) WARN\b")
# The head of a warning that Python prints, behind the path of the file.
_PYTHON_WARNS = re.compile(r"\.py:\d{1,6}\S{0,400}: \w{0,60}Warning: ")
_MAX_CHARS = 2_000
# The name of an exception class, then ": " and a message, a quoted message in brackets, or nothing.
_NAMED = re.compile(
    r"(?<![\w.])(?P<kind>(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{1,80}(?:Error|Exception))"
    r"(?:: (?P<words>\S.{0,1000})|\((?P<quoted>['\"].{1,300}?['\"])\)|$)"
)
# Words in an error that a run survived.
_SURVIVED = ("retry", "ignor", "skip", "fall back", "falling back", "fallback", "warn", "caught")


def lone_error(lines: Sequence[LogLine]) -> Traceback | None:
    """Return the error without a traceback with which a log ends; None if it ends otherwise.

    An error that gives a reason is preferred to a report that some process failed.
    """
    whole = list(_whole_lines(lines))
    reason = next((one for one in whole if not one.is_report), None)
    return reason or next(iter(whole), None) or _within_line(lines) or _by_words(lines)


def pasted_errors(lines: Sequence[LogLine]) -> Iterator[LogLine]:
    """Yield the lines of a short text which say that something is wrong, the last one first."""
    if len(lines) > MAX_PASTED:
        return
    for line in reversed(lines):
        said = _MEASURED.sub("", line.text[:_MAX_CHARS])
        if _SAYS_WRONG.search(said) and not _AT_EASE.search(line.text):
            yield line


def is_warning(line: LogLine) -> bool:
    """Return whether the line is logged as a warning. Runs survive those."""
    return _WARNS.search(line.text[:120]) is not None or is_python_warning(line)


def is_nccl_warning(line: LogLine) -> bool:
    """Return whether NCCL logged the line as a warning, which is how it reports errors."""
    return _NCCL_WARNS.search(line.text[:_MAX_CHARS]) is not None


def is_python_warning(line: LogLine) -> bool:
    """Return whether Python's own `warnings` printed the line: nobody raised anything there."""
    return _PYTHON_WARNS.search(line.text[:_MAX_CHARS]) is not None


def as_error(line: LogLine) -> Traceback:
    """Return a line as an error without a traceback, so that its message can be read."""
    speaker, text = speaker_in(line.text)
    return _error(line, speaker, "Error", LOGGER.sub("", text.strip()[:_MAX_CHARS], count=1))


def _whole_lines(lines: Sequence[LogLine]) -> Iterator[Traceback]:
    """Yield the lines that consist of an exception's class and message, the last one first."""
    for place, line in reversed(list(enumerate(lines))):
        speaker, text = speaker_in(line.text)
        found = ERROR.fullmatch(untangled(LOGGER.sub("", text.strip()[:_MAX_CHARS], count=1)))
        if found is None:
            continue
        name = found["kind"].rpartition(".")[2]
        is_class = EXCEPTION_NAME.fullmatch(name) and name not in NO_CLASSES
        if is_class and not _is_ignored(lines, place):
            yield _error(line, speaker, found["kind"], (found["words"] or "").strip())


def _within_line(lines: Sequence[LogLine]) -> Traceback | None:
    for place in range(len(lines) - 1, max(-1, len(lines) - 1 - _VERY_LAST), -1):
        line = lines[place]
        speaker, text = speaker_in(line.text)
        text = text.strip()[:_MAX_CHARS]
        found = _NAMED.search(text)
        if found is None or any(word in text.lower() for word in _SURVIVED):
            continue
        if not _is_ignored(lines, place):
            words = (found["words"] or found["quoted"] or "").strip()
            return _error(line, speaker, found["kind"], words)
    return None


def _is_ignored(lines: Sequence[LogLine], place: int) -> bool:
    """Return whether Python printed just before that it ignores this exception."""
    return any(IGNORED in one.text.lower() for one in lines[max(0, place - MAX_BETWEEN) : place])


def _by_words(lines: Sequence[LogLine]) -> Traceback | None:
    """Return a logger's line of level error, if its text is worded like an exception's message."""
    line = error_at_end(lines)
    if line is None:
        return None
    error = as_error(line)
    return error if details_of("", error.message) else None


def _error(line: LogLine, speaker: str, kind: str, words: str) -> Traceback:
    return Traceback(line, line, (), kind, words, speaker, has_head=False)
