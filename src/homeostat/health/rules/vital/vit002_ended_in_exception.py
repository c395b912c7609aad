"""The run ended in an exception that no rule recognises, so its text is read instead.

## What it sees
The first cause among the tracebacks and crashes at the end of the log, with no step after it: of
several ranks, workers and chained exceptions, the one that the others follow from. The doctor reads
from it the library and the call that failed, the deepest frame of the user's own code, what the
exception's words say was wrong (a shape, a type, a device, an argument, a key), whether the words
are a known message of a library, and what the other processes said. It is a warning if the words
tell what was wrong, or if a guess is as often right as not; else it is information. If a rule knows
the words, or the user's own code raised (VIT001, VIT006), that finding is shown instead. In a text
of a few lines without any metric, which somebody pasted to ask about it, a line that reads like an
error is enough.

## Why it matters
The run is dead, whatever its metrics look like. The verdict is then "not known", never "no
illness", and the exit code is 1.

## Likely causes
- library-version-mismatch: a library asks another one for an argument or a name that it lacks.
- package-missing, gpu-architecture-unsupported, cuda-toolkit-mismatch, extension-abi-mismatch and
  other names of installations: the words name a package, a version, a compiler or a GPU.
- shape-mismatch, dtype-mismatch, device-mismatch: the words name what does not fit.
- reward-fn-signature, column-missing, unknown-setting, path-missing, checkpoint-keys-mismatch: the
  words name an argument, a column, a setting, a file or weights.
- any other name: a library's message with these words states it. Almost 17,000 messages are known.
- ended-in-exception: the exception's own words say what is known. Guesses follow these causes,
  marked as such: the causes of the nearest known errors, and how often such guesses are right. If
  the user's own code raised, a guess is no reason for a warning.

## What to do
Read the exception and the frame that raised it. Resume from the newest checkpoint.

## Known false alarms
A traceback that was caught, if the log is cut off within the next steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from homeostat.health.failures.advice import advice_on
from homeostat.health.failures.end_lines import LAUNCHER, End
from homeostat.health.failures.lone_errors import (
    as_error,
    is_nccl_warning,
    is_warning,
    pasted_errors,
)
from homeostat.health.failures.reading import ExceptionReading, read_exception
from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.guesses.known_cases import Guess, merged
from homeostat.health.guesses.second_opinion import RIGHT_LOOSELY, as_cause, guesses_at, helped
from homeostat.health.log import LogLine
from homeostat.health.rule import Rule
from homeostat.health.signatures.unsaid import continues_warning
from homeostat.health.view import RunView
from homeostat.health.vital_signs.ending import Ending, ending_of
from homeostat.health.vital_signs.last_exception import last_exception
from homeostat.health.words import shortened

# Share of right ones from which on a guess is worth a warning.
_LIKELY = 0.5
# The share of first guesses, most of them a version, that were right where a library raised before
# any step and its words were not read: 36 of 57 (bench/guesses.py --unseen).
_RIGHT_IN_LIBRARY = 0.6


def check(view: RunView, _: object) -> Iterator[Sighting]:
    ending = ending_of(view)
    if ending.how is End.UNKNOWN and not view.metrics:
        lines = pasted_errors(view.log.lines)
        found = [_words_of(view, one) for one in lines if not continues_warning(one, view.log)]
        if found:
            # Of several lines, one whose words tell what was wrong says most.
            errors = [one for one in found if not is_warning(one.failure.end)]
            stated = (one for one in (*errors, *found) if one.stated)
            told = (one for one in errors if one.likely)
            yield _pasted(view, next(chain(told, stated), found[0]))
    if ending.how is not End.EXCEPTION or _is_launchers(ending):
        return
    reading = last_exception(view)
    yield _unread(view, ending) if reading is None else _read(view, reading)


def _is_launchers(ending: Ending) -> bool:
    """Return whether only the launcher reports a failure, which ERR140 and the verdict say."""
    if ending.traceback is not None:
        return ending.traceback.is_report
    return ending.line is not None and LAUNCHER in ending.words


def _unread(view: RunView, ending: Ending) -> Sighting:
    """Report a death of which there is no traceback."""
    line = ending.line
    known = guesses_at(view.log, line.number) if line is not None else ()
    reading = _words_of(view, line) if line is not None else None
    own = "the run's own event says so" if line is None else "there is no traceback in this log"
    return Sighting(
        message=_sentence(f"The run is dead: {shortened(ending.words, 300)}"),
        evidence=(f"line {line.number}: {shortened(line.text.strip(), 300)}",) if line else (),
        causes=tuple(_causes(reading, known, own)),
        fixes=tuple(helped(known)),
        first_step=line.step if line is not None else view.last_step,
        **_worth_a_warning(reading, known),
    )


def _words_of(view: RunView, line: LogLine) -> ExceptionReading:
    """Read a line that no exception's class begins."""
    return read_exception(as_error(line), (), view.log)


def _pasted(view: RunView, reading: ExceptionReading) -> Sighting:
    """Report what reads like an error in a few lines that somebody pasted."""
    line = reading.failure.end
    # Runs survive what is logged as a warning: it is read only if the library's message is known.
    worth = None if is_warning(line) else reading
    is_mild = is_warning(line) and not is_nccl_warning(line)
    said = reading if reading.stated is not None else worth
    like = "a warning that no rule knows" if is_mild else "an error that no rule knows"
    if reading.stated is not None:
        like = "a message of a library"
    known, words = guesses_at(view.log, line.number), shortened(line.text.strip(), 300)
    return Sighting(
        message=f"Line {line.number} reads like {like}: {words}",
        evidence=(f"line {line.number}: {words}",),
        causes=tuple(_causes(said, known, "these lines do not say whether a run ended in it")),
        fixes=(*_advice(said), *helped(known)),
        **_worth_a_warning(worth, () if is_mild else known),
    )


def _worth_a_warning(reading: ExceptionReading | None, known: Sequence[Guess]) -> dict[str, Any]:
    if reading is not None and reading.likely is not None:
        return {"level": Level.WARN, "confidence": Confidence.INFERRED}
    if not known or _right(reading, known[0]) < _LIKELY:
        return {}
    return {"level": Level.WARN, "confidence": Confidence.HEURISTIC}


def _right(reading: ExceptionReading | None, guess: Guess) -> float:
    """Return how often such a guess is right where this exception was raised."""
    if reading is not None and reading.is_users_own:
        return RIGHT_LOOSELY
    if reading is None or reading.likely is not None or not reading.library:
        return guess.right
    is_early = guess.is_first and reading.failure.end.step is None
    return max(guess.right, _RIGHT_IN_LIBRARY) if is_early else guess.right


def _read(view: RunView, reading: ExceptionReading) -> Sighting:
    found = reading.failure
    known = guesses_at(view.log, found.end.number)
    said = [
        _sentence(f"The run is dead: it ended in {shortened(found.error, 300)}"),
        "No rule knows these words."
        if reading.stated is None
        else "A library raises this message.",
    ]
    if reading.where:
        said.append(f"Read from its frames: {reading.where}.")
    if reading.wrong and reading.wrong.rstrip(".") not in found.error:
        said.append(_sentence(f"Read from its words: {shortened(reading.wrong, 300)}"))
    lines = {line.number: line.text.strip() for line in (found.start, found.end)}
    return Sighting(
        message=" ".join(said),
        evidence=(
            *(f"line {number}: {shortened(text, 300)}" for number, text in lines.items()),
            *(_quoted_or_said(one) for one in reading.others),
        ),
        causes=tuple(_causes(reading, known, shortened(found.error, 200))),
        fixes=(*_fixes(reading), *helped(known)),
        first_step=found.end.step,
        last_step=found.end.step,
        # What the user's own code raised is rarely what a library's errors are: a mere hint.
        **_worth_a_warning(reading, () if reading.is_users_own else known),
    )


def _quoted_or_said(words: str) -> str:
    """Return a fact as a sentence; one that quotes a line keeps its form, by which it is known."""
    return words if words.startswith("line ") else f"{words[0].upper()}{words[1:]}."


def _sentence(words: str) -> str:
    return words if words.endswith((".", "!", "?")) else f"{words}."


def _causes(reading: ExceptionReading | None, known: Sequence[Guess], own: str) -> Iterator[Cause]:
    """Yield what its words say, then guesses, the surest first; equal causes only once.

    `own` is said where there is neither.
    """
    found: dict[str, Cause] = {}
    if reading is not None and reading.likely is not None:
        name, why = reading.likely
        how = "" if reading.stated is not None else "read, not recognised: "
        found[merged((name,))[0]] = Cause(name, f"{how}{why}")
        for other in reading.also:
            found.setdefault(merged((other,))[0], Cause(other, "the message can mean this, too"))
    for one in known:
        found.setdefault(one.cause, as_cause(one, right=_right(reading, one)))
    if reading is not None and reading.is_loose and known and known[0].cause in found:
        found = {known[0].cause: found[known[0].cause], **found}
    yield from found.values() or (Cause("ended-in-exception", own),)


def _advice(reading: ExceptionReading | None) -> Iterator[Fix]:
    if reading is not None and reading.likely is not None:
        yield from advice_on(reading.likely[0])


def _fixes(reading: ExceptionReading) -> Iterator[Fix]:
    yield from _advice(reading)
    if reading.user is not None:
        yield Fix("", "", f"look at {reading.user}, the last line of your own code before it")
    elif reading.call is not None and reading.library:
        yield Fix("", "", f"look up {reading.library}'s {reading.call.function} and these words")


RULE = Rule(
    code="VIT002",
    name="ended-in-exception",
    family=Family.CONFIG,
    # The illness is not known: the verdict and the exit code say so.
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("log",),
    explains=("ERR140",),
    yields_to=("ERR", "VIT001", "VIT006"),
)
