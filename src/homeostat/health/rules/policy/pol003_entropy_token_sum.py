"""Entropy looks huge because it is a sum over tokens.

## What it sees
The logged entropy is above `most` nats, more than any vocabulary allows for one token, in most
records.

## Why it matters
The policy is not broken: the number is the sum of the entropies of a completion's tokens. Limits
for an entropy per token do not apply to it.

## Likely causes
- benign-entropy-token-sum: losses are summed over tokens, and so is the entropy.

## What to do
Divide by the mean length, or aggregate by the mean over tokens; training needs no change.

## Known false alarms
None: nothing needs to be cured.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import newest
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    most: float = option(13.0, "Entropy of one token that no vocabulary allows.")
    fire: int = option(3, "Number of records that must show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    entropy = view.series("entropy")
    assert entropy is not None, "needs says so"
    above = entropy.finite().values > options.most
    if above.sum() < options.fire or above.mean() < 0.8:
        return
    value, length = (
        median(entropy.finite().values),
        newest(view, "completions/mean_length"),
    )
    per_token = value / length if length else None
    yield Sighting(
        message=f"Entropy reads {value:.4g}, more than a single token can have: it is a sum over "
        + (
            f"tokens, about {per_token:.2g} for each."
            if per_token
            else "tokens. No cure is needed."
        ),
        evidence=(f"entropy {value:.4g}",)
        + ((f"mean length {length:.4g}",) if length is not None else ()),
        causes=(Cause("benign-entropy-token-sum", "no token's entropy can be that large"),),
        fixes=(
            Fix(
                "",
                "the mean over tokens",
                "makes the number readable",
                Grade.ADVICE,
                theirs={"verl": "actor_rollout_ref.actor.loss_agg_mode"},
            ),
        ),
        first_step=int(entropy.steps[0]),
        last_step=int(entropy.steps[-1]),
        value=value,
        limit=options.most,
    )


RULE = Rule(
    code="POL003",
    name="benign-entropy-token-sum",
    family=Family.POLICY,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("entropy",),
    kinds=(Kind.RL,),
    options=Options,
)
