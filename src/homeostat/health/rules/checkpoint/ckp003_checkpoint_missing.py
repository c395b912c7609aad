"""No checkpoint was saved for a long time.

## What it sees
Our own runs: more than `factor` times checkpoint.interval_steps steps since the last checkpoint
event, or since the start.

## Why it matters
A crash would lose all of these steps.

## Likely causes
- checkpoint-missing: saving fails or hangs without an event.

## What to do
Check whether the disk responds and whether a save is still in progress.

## Known false alarms
None: steps are counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView


class Options(RuleOptions):
    factor: float = option(2.5, "Intervals without a checkpoint.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    interval, last = view.number("checkpoint.interval_steps"), view.last_step
    if not interval or last is None or view.framework.name != "homeostat":
        return
    saved = [event.step or 0 for event in view.events_of("checkpoint_saved", "run_resumed")]
    since = last - max(saved, default=0)
    if since <= options.factor * interval:
        return
    yield Sighting(
        message=f"No checkpoint for {since} steps, though one is due every {interval:g}. Check the "
        "disk, and the events of failed checkpoints.",
        causes=(Cause("checkpoint-missing", f"{since} steps without a checkpoint"),),
        fixes=(
            Fix("checkpoint.interval_steps", f"{interval:g}", "checkpoints are due that often"),
        ),
        first_step=max(saved, default=0),
        last_step=last,
        value=float(since),
        limit=options.factor * interval,
    )


RULE = Rule(
    code="CKP003",
    name="checkpoint-missing",
    family=Family.CHECKPOINT,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("setting:checkpoint.interval_steps", "events"),
    options=Options,
)
