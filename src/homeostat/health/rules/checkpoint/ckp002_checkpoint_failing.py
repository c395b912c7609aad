"""Checkpoints cannot be written.

## What it sees
Our events checkpoint_failed with no checkpoint saved after them.

## Why it matters
The run continues without a safety net: if it ends, everything since the last good checkpoint is
lost.

## Likely causes
- disk-full-or-quota: the error says that there is no room.
- checkpoint-failing: missing permissions, or a lost network file system.

## What to do
Make room or lower checkpoint.keep_last; see the error in the event.

## Known false alarms
None: they are counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.view import RunView
from homeostat.health.words import counted, shortened

_FULL = ("no space", "quota", "errno 28", "errno 122", "disk full")


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    failed = view.events_of("checkpoint_failed")
    if not failed:
        return
    saved = view.events_of("checkpoint_saved")
    again = bool(saved) and (saved[-1].step or 0) > (failed[-1].step or 0)
    error = shortened(str(failed[-1].fields.get("error", "")).strip(), 200)
    full = any(word in error.lower() for word in _FULL)
    cause = Cause("disk-full-or-quota" if full else "checkpoint-failing", error or "it failed")
    yield Sighting(
        message=f"{counted(len(failed), 'checkpoint')} could not be written, last at step "
        f"{failed[-1].step}"
        + (", later ones could" if again else "")
        + f": {error or 'no error was kept'}. "
        + ("Make room." if full else "Check the folder and its permissions."),
        causes=(cause,),
        fixes=(
            Fix("checkpoint.keep_last", "1", "fewer old checkpoints are kept", Grade.SAFE),
            Fix("runs_dir", "another disk", "a place with room"),
        ),
        first_step=failed[0].step,
        last_step=failed[-1].step,
        value=float(len(failed)),
        level=Level.INFO if again else None,
    )


RULE = Rule(
    code="CKP002",
    name="checkpoint-failing",
    family=Family.CHECKPOINT,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("events",),
    explains=("CKP003",),
)
