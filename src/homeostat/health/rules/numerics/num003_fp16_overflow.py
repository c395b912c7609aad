"""fp16 overflows: the gradient is not finite although the loss may look normal.

## What it sees
A run in fp16 whose gradient norm is not finite in the newest records, or in more than `max_share`
of all. Single such steps are only information: this is how dynamic loss scaling finds its scale.

## Why it matters
The largest fp16 number is 65504. Activations and gradients of today's models exceed it; at best
each such update is skipped, so that less and less is learned.

## Likely causes
- fp16-overflow: the range of fp16.
- lr-too-high: with a rate that is too high weights grow until they overflow.

## What to do
Train in bf16 (Ampere GPUs and newer), which has the range of fp32. If that is not possible, use a
lower rate, a smaller initial loss scale and gradient clipping.

## Known false alarms
The first dozen steps, while the loss scale is still being found.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import (
    broken,
    labels_masked,
    peak_rate,
    precision,
    usual_rates,
)
from homeostat.health.view import RunView


class Options(RuleOptions):
    fire: int = option(2, "Number of newest records that are a warning.")
    max_share: float = option(0.1, "Share of all records that is a warning.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    bad = broken(view)
    assert bad is not None, "needs says so"
    if precision(view) != "fp16" or not bad.values.any() or labels_masked(view):
        return
    held = bad.values > 0
    share = float(held.mean())
    lasting = len(held) >= options.fire and bool(held[-options.fire :].all())
    often = share > options.max_share and int(held.sum()) >= 3
    first = int(bad.steps[np.flatnonzero(held)[0]])
    yield Sighting(
        message=f"In fp16 the gradient is not finite since step {first} ({share:.0%} of the "
        "records): the numbers leave fp16's range, and such updates are lost. Train in bf16.",
        evidence=(f"{int(held.sum())} of {len(held)} records are not finite",),
        causes=tuple(_causes(view)),
        fixes=(
            Fix("trainer.precision", "bf16", "bf16 has the range of fp32", Grade.UNSAFE),
            Fix("trainer.lr", "a third of it", "weights that stay smaller", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=int(bad.steps[-1]),
        value=share,
        limit=options.max_share,
        level=Level.WARN if lasting or often else Level.INFO,
    )


def _causes(view: RunView) -> Iterator[Cause]:
    yield Cause("fp16-overflow", "the run is in fp16, which ends at 65504")
    rate, usual = peak_rate(view), usual_rates(view)
    if rate is not None and usual is not None and rate > 2 * usual.high:
        yield Cause("lr-too-high", f"rate {rate:.2g}; {usual.what}: up to {usual.high:.2g}")


RULE = Rule(
    code="NUM003",
    name="fp16-overflow",
    family=Family.NUMERICS,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("train/loss|train/policy_loss|grad_norm",),
    options=Options,
    explains=("NUM002", "NUM006", "DAT001"),
)
