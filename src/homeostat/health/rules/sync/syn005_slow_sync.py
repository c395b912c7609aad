"""Publishing the weights takes a large share of the step.

## What it sees
sync/seconds above `max_share` of time/step on average over the newest records.

## Why it matters
The engine is idle in the meantime, and so is the trainer.

## Likely causes
- slow-weight-sync: tensor by tensor in place of buckets, over the disk or the network in place of
  shared memory.

## What to do
Share memory (in one process, or CUDA IPC on one node), use larger buckets. Publishing less often
makes samples older: only with importance correction.

## Known false alarms
Steps that are very short, in tests; hence information only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_share: float = option(0.2, "Largest acceptable share of a step.")
    min_s: float = option(1.0, "Seconds below which it does not matter.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    took, step = needed(view, "sync/seconds").tail(20), needed(view, "time/step").tail(20)
    share = float(np.median(took.values)) / max(float(np.median(step.values)), 1e-9)
    if len(took) < 3 or share <= options.max_share or float(np.median(took.values)) < options.min_s:
        return
    seconds = float(np.median(took.values))
    yield Sighting(
        message=f"Publishing the weights takes {seconds:.3g} s: {share:.0%} of a step (usual: "
        f"below {options.max_share:.0%}). Share memory, or send in larger buckets.",
        causes=(Cause("slow-weight-sync", f"{seconds:.3g} s of a step"),),
        fixes=(
            Fix("sync.transport.type", "cuda_ipc", "nothing is copied over the host", Grade.SAFE),
            Fix("sync.transport.bucket_bytes", "2GB", "fewer, larger messages", Grade.SAFE),
        ),
        first_step=int(took.steps[0]),
        last_step=int(took.steps[-1]),
        value=share,
        limit=options.max_share,
    )


RULE = Rule(
    code="SYN005",
    name="slow-weight-sync",
    family=Family.SYNC,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("sync/seconds", "time/step"),
    kinds=(Kind.RL,),
    options=Options,
)
