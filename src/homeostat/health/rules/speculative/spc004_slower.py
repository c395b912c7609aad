"""Drafting gives too few tokens per verification to pay for itself.

## What it sees
The mean number of tokens that one verification gives (`spec/accept_length`, 1 where no draft token
is ever accepted) below `min_length` over the newest records.

## Why it matters
Without drafting each pass gives one token. What is gained beyond it must pay for the draft's own
passes and for verifying several tokens at once: a quarter of a token does not.

## Likely causes
- spec-slower: a draft that is too large, or one that looks too far ahead for how often it is right.
- spec-low-acceptance: most of what it proposes is rejected.

## What to do
Measure tokens per second with drafting off. Then look fewer tokens ahead, take a draft of a tenth
to a quarter of the model's size, train it on the policy's own answers, or leave it off.

## Known false alarms
Logs that count only accepted draft tokens: the smallest value is then 0 and not 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.view import RunView


class Options(RuleOptions):
    min_length: float = option(1.25, "Tokens per verification below which nothing is gained.")
    min_records: int = option(3, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    length = needed(view, "spec/accept_length").finite()
    late = length.tail(5)
    # Below 1 it counts accepted draft tokens alone, and says nothing that this rule can judge.
    if len(length) < options.min_records or float(late.values.min()) < 1.0:
        return
    mean = float(late.values.mean())
    if mean >= options.min_length:
        return
    said = f"one verification gives {mean:.2f} tokens (limit {options.min_length:g})"
    share = view.series("spec/accept_share")
    causes = [Cause("spec-slower", said)]
    if share is not None and len(share.finite()):
        rate = float(share.finite().tail(5).values.mean())
        causes.append(Cause("spec-low-acceptance", f"{rate:.0%} of the draft is accepted"))
    yield Sighting(
        message=f"Drafting saves nothing: {said}. Look fewer tokens ahead, take a smaller draft, "
        "or leave it off.",
        causes=tuple(causes),
        fixes=(
            Fix("engine.speculative.num_tokens", "3", "fewer drafted tokens are thrown away"),
            Fix("engine.speculative.draft_model", "none", "measure the speed without it"),
        ),
        first_step=int(late.steps[0]),
        last_step=int(late.steps[-1]),
        value=mean,
        limit=options.min_length,
    )


RULE = Rule(
    code="SPC004",
    name="spec-slower",
    family=Family.SPECULATIVE,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("spec/accept_length",),
    options=Options,
)
