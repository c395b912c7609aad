"""Saving takes a large share of the time.

## What it sees
time/checkpoint in all above `max_share` of the time of all steps, in at least `min_s` seconds. A
warning above `warn_share`, after `warn_saves` checkpoints that took `warn_s` seconds together.

## Why it matters
Devices wait while files are written.

## Likely causes
- checkpoint-slow: saving too often, or to a slow disk.

## What to do
Save less often, or to a local disk; export weights at the end only.

## Known false alarms
Very short runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(0.15, "Largest acceptable share of the time.")
    min_s: float = option(60.0, "Seconds below which it does not matter.")
    warn_share: float = option(0.4, "Share that is a warning, however short the run ...")
    warn_saves: int = option(8, "... after so many checkpoints ...")
    warn_s: float = option(2.0, "... that took so many seconds together.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    spent = needed(view, "time/checkpoint").values
    saving, num_saves = float(np.nansum(spent)), int((spent > 0).sum())
    working = float(np.nansum(needed(view, "time/step").values)) * _steps_per_record(view)
    share = saving / max(saving + working, 1e-9)
    most = share > options.warn_share and num_saves >= options.warn_saves
    most = most and saving >= options.warn_s
    if not most and (saving < options.min_s or share <= options.max_share):
        return
    yield Sighting(
        message=f"Saving checkpoints took {saving:.3g} s, {share:.0%} of the time (usual: below "
        f"{options.max_share:.0%}). Save less often.",
        causes=(Cause("checkpoint-slow", f"{share:.0%} of the time"),),
        fixes=(
            Fix("checkpoint.interval_steps", "twice as many", "saves less often", Grade.SAFE),
            Fix("checkpoint.export", "final", "weights are exported once", Grade.SAFE),
        ),
        last_step=view.last_step,
        value=share,
        limit=options.max_share,
        level=Level.WARN if most else None,
    )


def _steps_per_record(view: RunView) -> float:
    steps = needed(view, "time/step").steps
    return median(np.diff(steps)) if len(steps) > 1 else 1.0


RULE = Rule(
    code="CKP005",
    name="checkpoint-slow",
    family=Family.CHECKPOINT,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("time/checkpoint", "time/step"),
    options=Options,
)
