"""The engine's process dies again and again.

## What it sees
Our events engine_restarted: one is information, `repeated` are a warning.

## Why it matters
After a restart the engine samples the round again from its start. Nothing is lost, but the same
cause will kill the engine again.

## Likely causes
- engine-restarts: host or device memory runs out, the engine has a bug, or the machine is about to
  fail.

## What to do
The event holds the error. Lower the engine's share of the memory and its concurrency.

## Known false alarms
None: they are counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView
from homeostat.health.words import counted, shortened


class Options(RuleOptions):
    repeated: int = option(2, "Number of restarts from which on it is a warning.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    found = view.events_of("engine_restarted")
    if not found:
        return
    error = shortened(str(found[-1].fields.get("error", "")).strip(), 160)
    yield Sighting(
        message=f"The engine died and was restarted {counted(len(found), 'time')}, last at step "
        f"{found[-1].step}. See the error, the host's memory and the engine's share.",
        evidence=(error,) if error else (),
        causes=(Cause("engine-restarts", error or "its process ended"),),
        fixes=(
            Fix("engine.memory_share", "less", "leaves memory for the other processes", Grade.SAFE),
            Fix(
                "engine.max_concurrency",
                "half of it",
                "fewer requests take memory at one time",
                Grade.SAFE,
            ),
        ),
        first_step=found[0].step,
        last_step=found[-1].step,
        value=float(len(found)),
        limit=float(options.repeated),
        level=Level.WARN if len(found) >= options.repeated else Level.INFO,
    )


RULE = Rule(
    code="DST002",
    name="engine-restarts",
    family=Family.DISTRIBUTED,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("events",),
    options=Options,
)
