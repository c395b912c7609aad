"""Add to the first finding about an error what the known errors nearest to its words were.

    it only says that something failed (`LEAVES_OPEN`)   what rules know of its words, and up to
                                                         two guesses
    its rule inferred the cause from the words           one guess, if the nearest errors often
                                                         had a cause that no finding names
    the words say so themselves (`measured`)             none: they are right in 97 of 100 cases

Guesses come last in the list of causes and are marked as such (`Cause.guess`).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from homeostat.health.finding import Cause, Confidence, Finding, Fix, Level
from homeostat.health.guesses.known_cases import MAX_LINES, VERSIONS, Guess, guesses, merged
from homeostat.health.log import Log
from homeostat.health.signatures.lists import AFTERMATH

# Names that say that something failed and leave open what.
LEAVES_OPEN = frozenset(
    {
        "ended-in-exception", "user-code-failed", "script-failed", "rank-failed", "peer-rank-died",
        "worker-died-unknown", "native-crash", "stopped-early", "job-ended-from-outside",
        "engine-died", "engine-failed-to-start", "dataloader-worker-failed", "device-side-assert",
        "symptom-described",
    }
)  # fmt: skip
# Lines below the one in which an error ends that may still belong to it.
_MAX_MORE = 8
_MAX_BESIDE_OPEN = 2
_OWN_CODE = ("user-code-failed", "script-failed")
# Share of the votes from which on a guess is added to an inferred illness, and the share of such
# guesses that were a confirmed cause: 35 of 136 and 16 of 83 (bench/guesses.py). For errors that
# name their cause themselves it was 2 of 64.
_OFTEN = 0.1
_RIGHT_BESIDE = 0.2
# Share of the votes from which on most guesses are right.
_MOSTLY = 0.25
# The share of right ones, whatever their votes, where a rule only says that something failed, or
# where the user's own code raised: 7 of 47.
RIGHT_LOOSELY = 0.15
# The rule that reads exceptions adds its guesses itself.
_GUESSES_ITSELF = "VIT002"


def guesses_at(log: Log, number: int) -> tuple[Guess, ...]:
    """Guess the cause from the lines around the one in which an error ends."""
    end = bisect_right(log.lines, number + _MAX_MORE, key=lambda line: line.number)
    return guesses([line.text for line in log.lines[max(0, end - MAX_LINES) : end]])


def as_cause(guess: Guess, *, right: float | None = None) -> Cause:
    """Return a guess as a cause; `right` is the share of right ones if it is another than usual."""
    share = guess.right if right is None else right
    like = f", as in {guess.case.url}" if guess.case is not None else ""
    return Cause(guess.cause, f"a guess, right in about {share:.0%} of such cases{like}", share)


def helped(known: Sequence[Guess]) -> Iterator[Fix]:
    """Yield what helped in a thread with nearly the same words."""
    case = next((one.case for one in known if one.case is not None), None)
    if case is not None:
        yield Fix("", "", f"what helped in {case.url}: {case.fix}")


def with_guesses(
    findings: Sequence[Finding], quoted: Sequence[int], log: Log, *, seen: Sequence[Finding]
) -> list[Finding]:
    """Return the findings, the first one with guesses; `quoted` are the lines that it quotes.

    `seen` are all findings, also those that became evidence of another one.
    """
    if not findings or not quoted or findings[0].level is Level.INFO:
        return list(findings)
    first = findings[0]
    known = guesses_at(log, max(quoted))
    recognised = tuple(_recognised(first, seen))
    first = dataclasses.replace(first, causes=(*first.causes, *recognised))
    more = tuple(_beside([first, *findings[1:]], known))
    names = {cause.name for cause in more}
    # A guess that is seldom right hints where to look. It is no reason to change anything.
    least = _MOSTLY if first.name in LEAVES_OPEN else 0.0
    near = [one for one in known if one.cause in names and one.votes >= least]
    if first.name in _OWN_CODE:
        # Another version of a library does not repair the user's own code.
        near = [one for one in near if one.cause != VERSIONS]
    fixes = (*first.fixes, *helped(near))
    return [dataclasses.replace(first, causes=(*first.causes, *more), fixes=fixes), *findings[1:]]


def _recognised(first: Finding, seen: Sequence[Finding]) -> Iterator[Cause]:
    """Yield what rules that know the words say, where the first finding leaves open what failed."""
    if first.name not in LEAVES_OPEN:
        return
    said = {first.name, *(cause.name for cause in first.causes)}
    for one in seen:
        is_error = one.code.startswith("ERR") and one.level is not Level.INFO
        # What other processes say when they lost the one that raised is no cause of its exception.
        is_consequence = one.code in AFTERMATH and first.code.startswith("VIT")
        if is_error and not is_consequence and one.name not in said | LEAVES_OPEN:
            said.add(one.name)
            yield Cause(one.name, f"{one.code} knows these words")


def _beside(findings: Sequence[Finding], known: Sequence[Guess]) -> Iterator[Cause]:
    first = findings[0]
    said = {one.name for one in findings} | {c.name for one in findings for c in one.causes}
    others = [one for one in known if one.cause not in merged(said)]
    if first.name in LEAVES_OPEN and first.code != _GUESSES_ITSELF:
        yield from (as_cause(one, right=RIGHT_LOOSELY) for one in others[:_MAX_BESIDE_OPEN])
    elif first.code.startswith("ERR") and first.confidence is not Confidence.MEASURED:
        yield from (as_cause(one, right=_RIGHT_BESIDE) for one in others[:1] if one.votes >= _OFTEN)
