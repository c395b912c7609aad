"""Routing replay was asked for, and no routes ever came.

## What it sees
Routing replay is on in our own run, and no trained token was replayed in the newest `fire` records:
moe/replayed_share is 0, or is not logged although steps were made.

## Why it matters
The run trains as if the replay were off, and nothing else says so. In other frameworks this is the
usual failure of routing replay: the flag is set, the engine was not started to return routes, or
the routes are filled into modules that never run.

## Likely causes
- routing-replay-data-missing: the engine does not record, or what it records does not reach the
  trainer.

## What to do
Ask the engine for one completion and look whether it has `routed_experts`. Our own engine always
can; vLLM and SGLang need a version and a flag for it.

## Known false alarms
None known.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.frameworks import HOMEOSTAT
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.moe.routing import is_replaying
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    fire: int = option(2, "Number of newest records that must all show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    if not is_replaying(view):
        return
    share, steps = view.series("moe/replayed_share"), view.series("reward", "train/loss")
    if share is None and view.framework.name != HOMEOSTAT.name:
        yield Unknown("moe/replayed_share is logged by our own runs alone")
        return
    records = share if share is not None else steps
    if records is None or len(records) < options.fire:
        return
    if share is not None and share.tail(options.fire).values.max() > 0.0:
        return
    said = "moe/replayed_share is 0" if share is not None else "moe/replayed_share was never logged"
    yield Sighting(
        message=f"Routing replay is on, and no token was replayed: {said}. The trainer chooses "
        "experts by itself. Look whether the engine returns routes.",
        evidence=(f"{said} over {options.fire} records or more",),
        causes=(
            Cause("routing-replay-data-missing", said),
            Cause("moe-routing-mismatch", "without replay, trainer and engine route differently"),
        ),
        fixes=(
            Fix("engine.type", "native", "our own engine records the routes", Grade.SAFE),
            Fix(
                "model.moe.router_replay",
                "off",
                "the settings then say what the run does",
                Grade.SAFE,
            ),
        ),
        first_step=_first(records, is_share=share is not None),
        last_step=view.last_step,
    )


def _first(records: Series, *, is_share: bool) -> int:
    """Return the step from which on no token was replayed."""
    if not is_share:
        return int(records.steps[0])
    replayed = [position for position, value in enumerate(records.values) if value > 0.0]
    return int(records.steps[replayed[-1] + 1 if replayed else 0])


RULE = Rule(
    code="MOE009",
    name="routing-replay-data-missing",
    family=Family.MOE,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    kinds=(Kind.RL,),
    options=Options,
    explains=("MOE005",),
)
