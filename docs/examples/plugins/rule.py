"""Completions are too short to hold an answer.

## What it sees
The mean length of completions in the newest record is below `min_tokens`.

## Why it matters
A policy that learned to stop at once earns nothing and explores nothing.

## Likely causes
- answers-too-short: the reward favours short completions, or the prompt does not ask for more.

## What to do
Read completions with `homeostat inspect`, and compare the rewards of the shortest ones.

## Known false alarms
Tasks whose answers are short: lower `min_tokens`.
"""

from collections.abc import Iterator

from homeostat.plugins import (
    Confidence,
    Family,
    Level,
    Rule,
    RuleOptions,
    RunView,
    Sighting,
    option,
)


class Options(RuleOptions):
    min_tokens: float = option(2.0, "Smallest mean length that is not reported.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    length = view.latest("completions/mean_length")
    if length is not None and length < options.min_tokens:
        yield Sighting(
            message=f"Completions have {length:.1f} tokens on average.",
            value=length,
            limit=options.min_tokens,
        )


RULE = Rule(
    code="OWN001",
    name="answers-too-short",
    family=Family.GENERATION,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("completions/mean_length",),
    options=Options,
)
