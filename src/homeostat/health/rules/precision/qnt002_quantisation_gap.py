"""A quantised engine differs from the trainer by more than its rounding should cost.

## What it sees
The engine is quantised and the mean distance of its log-probs from the trainer's is above `max_gap`
nats over most of the newest records.

## Why it matters
The policy that samples is not the policy that is trained. Importance weights correct this bias at
the cost of variance.

## Likely causes
- quantisation-gap: one scale for too many values, or layers that are sensitive to it (lm_head,
  embeddings, router).

## What to do
Quantise in blocks with scales in fp32 (smaller groups for INT4), leave sensitive layers out,
correct with importance weights. The further the policy has moved, the more the gap costs: start
from bf16.

## Known false alarms
None known.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.precision.kinds import quantisation
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_gap: float = option(0.08, "Nats that quantisation may cost.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    kind = quantisation(view)
    gap = needed(view, "sampling/sampling_logp_difference/mean").tail(10)
    if not kind or len(gap) < 3 or float(np.mean(gap.values > options.max_gap)) < 0.7:
        return
    size = median(gap.values)
    yield Sighting(
        message=f"The {kind} engine differs from the trainer by {size:.2g} nats (limit "
        f"{options.max_gap:g}). Quantise in smaller blocks, leave lm_head and embeddings out, and "
        "correct with importance weights.",
        causes=(Cause("quantisation-gap", f"{kind} weights, {size:.2g} nats"),),
        fixes=(
            Fix(
                "algorithm.correction.weight.type",
                "token",
                "importance weights account for the difference",
                Grade.UNSAFE,
            ),
            Fix(
                "",
                "blockwise",
                "a scale for each block",
                theirs={"miles": "--fp8-recipe", "slime": "--fp8-recipe"},
            ),
            Fix(
                "",
                "leave embeddings and output layer out",
                "sensitive layers stay in bf16",
            ),
        ),
        first_step=int(gap.steps[0]),
        last_step=int(gap.steps[-1]),
        value=size,
        limit=options.max_gap,
    )


RULE = Rule(
    code="QNT002",
    name="quantisation-gap",
    family=Family.PRECISION,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("sampling/sampling_logp_difference/mean",),
    kinds=(Kind.RL,),
    options=Options,
)
