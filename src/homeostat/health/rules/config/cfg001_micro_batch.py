"""A micro-batch is larger than a device's share of an update.

## What it sees
Rows per micro-batch and device above the device's share of the mini batch (mini batch times samples
per prompt, over all devices).

## Why it matters
Trainers divide one by the other to get the number of accumulation steps. The result is 0: the loss
looks ordinary, but the gradient is divided by 0 and becomes NaN.

## Likely causes
- micro-batch-exceeds-mini-batch: sizes that were chosen for fewer devices.

## What to do
Lower the micro-batch, or raise the mini batch. homeostat's trainer packs the rows of an update and
does not compute this quotient.

## Known false alarms
A version that lowers the micro-batch by itself: if the gradient is finite, nothing is reported.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.config.batch import micro_exceeds_mini
from homeostat.health.view import RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    batch = micro_exceeds_mini(view)
    if batch is None:
        return
    norm = view.series("grad_norm")
    broken = norm is not None and not np.isfinite(norm.values).any()
    if norm is not None and not broken:
        return
    yield Sighting(
        message=f"A micro-batch has {batch.micro:g} rows, but a device's share of an update is "
        f"{batch.share:g} (over {batch.devices:g} devices): it accumulates 0 times"
        + (", and the gradient is NaN at every step" if broken else "")
        + ". Lower the micro-batch.",
        evidence=(f"{batch.micro:g} rows > {batch.share:g}",),
        causes=(Cause("micro-batch-exceeds-mini-batch", "the quotient of both is 0"),),
        fixes=(
            Fix(
                "trainer.micro_batch_rows",
                f"{max(1, int(batch.share)):d}",
                "at most a device's share of the update",
                Grade.SAFE,
                theirs={"verl": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"},
            ),
        ),
        first_step=int(norm.steps[0]) if norm is not None else None,
        last_step=view.last_step,
        value=batch.micro,
        limit=batch.share,
    )


RULE = Rule(
    code="CFG001",
    name="micro-batch-exceeds-mini-batch",
    family=Family.CONFIG,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    explains=("NUM002", "NUM003", "NUM004", "LRN005"),
)
