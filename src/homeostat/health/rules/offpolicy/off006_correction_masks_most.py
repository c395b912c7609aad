"""The off-policy correction leaves out or bounds a large part of the batch.

## What it sees
The share of tokens that are masked, rejected, vetoed or left out as off-policy (or whose weight is
at its bound) stays above `limit` in `fire` of the newest `window` records.

## Why it matters
Tokens that are left out cost compute but teach nothing, and the rest is a biased sample of the
policy.

## Likely causes
- stale-policy: samples are too old.
- engine-logprob-mismatch: engine and trainer differ although weights are the same.
- correction-masks-most: the bounds are narrow for this model's rounding.

## What to do
Find out why the two differ before widening the bounds: publish more often, compare log-probs.

## Known false alarms
Narrow bounds by intent.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.offpolicy.gap import gap_of, staleness
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView

_KINDS = ("masked", "rejected", "vetoed", "off_policy", "truncated")


class Options(RuleOptions):
    limit: float = option(0.3, "Largest acceptable share of the tokens.")
    fire: int = option(4, "Number of records that must show it ...")
    window: int = option(6, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    for kind in _KINDS:
        share = view.series(f"correction/tokens/{kind}")
        if share is None:
            continue
        spell = newest_spell(
            share.values > options.limit, fire=options.fire, window=options.window, clear=4
        )
        if spell is None or not spell.is_open:
            continue
        first = int(share.steps[spell.start])
        value = float(np.mean(share.values[spell.start : spell.end + 1]))
        yield Sighting(
            message=f"The correction has {kind.replace('_', ' ')} {value:.0%} of the tokens since "
            f"step {first} (limit {options.limit:.0%}). Find out why trainer and engine differ.",
            evidence=(f"correction/tokens/{kind} {value:.3g}",),
            causes=tuple(_causes(view)),
            fixes=(
                Fix("sync.interval", "1", "fresher samples", Grade.UNSAFE),
                Fix("algorithm.correction.weight.high", "larger", "a wider bound", Grade.UNSAFE),
            ),
            first_step=first,
            last_step=int(share.steps[spell.end]),
            value=value,
            limit=options.limit,
            subject=kind,
        )


def _causes(view: RunView) -> Iterator[Cause]:
    age, gap = staleness(view), gap_of(view)
    if age > 0.0:
        yield Cause("stale-policy", f"samples are {age:.2g} steps old")
    if age == 0.0 and gap is not None and gap.level > gap.limit:
        yield Cause("engine-logprob-mismatch", f"{gap.name} is {gap.level:.3g}")
    yield Cause("correction-masks-most", "the bounds leave out much of the batch")


RULE = Rule(
    code="OFF006",
    name="correction-masks-most",
    family=Family.OFFPOLICY,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=(
        "correction/tokens/masked|correction/tokens/rejected|correction/tokens/vetoed"
        "|correction/tokens/off_policy|correction/tokens/truncated",
    ),
    kinds=(Kind.RL,),
    options=Options,
)
