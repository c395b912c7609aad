"""The disk has no room for another checkpoint.

## What it sees
The fact `disk` (free and needed bytes): less free than `checkpoints` times what one takes.

## Why it matters
Saving will fail. What was saved stays, but the run continues without a safety net.

## Likely causes
- disk-nearly-full: the disk holds other data, or more checkpoints than it has room for.

## What to do
Make room, keep fewer checkpoints, or use another disk.

## Known false alarms
Disks that grow by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView


class Options(RuleOptions):
    checkpoints: float = option(2.0, "Checkpoints that should fit.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    disk = view.facts["disk"]
    free, need = float(disk["free_bytes"]), float(disk["checkpoint_bytes"])
    if need <= 0 or free >= options.checkpoints * need:
        return
    yield Sighting(
        message=f"{free / 2**30:.3g} GiB are free where a checkpoint takes {need / 2**30:.3g} GiB. "
        "Make room, or keep fewer checkpoints.",
        causes=(Cause("disk-nearly-full", f"room for {free / need:.1f} checkpoints"),),
        fixes=(
            Fix("checkpoint.keep_last", "1", "fewer old checkpoints are kept", Grade.SAFE),
            Fix("runs_dir", "another disk", "a place with room"),
        ),
        value=free,
        limit=options.checkpoints * need,
        level=Level.ERROR if free < need else None,
    )


RULE = Rule(
    code="CKP004",
    name="disk-nearly-full",
    family=Family.CHECKPOINT,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("fact:disk",),
    options=Options,
)
