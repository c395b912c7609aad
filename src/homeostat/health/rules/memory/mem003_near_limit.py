"""Device memory is almost full.

## What it sees
Memory in use on a device above `max_share` of what it has (fact `device_bytes`), over the newest
records.

## Why it matters
The next long row, or an engine that wakes, runs out of memory.

## Likely causes
- memory-near-limit: batches are as large as they can be.

## What to do
Lower the tokens per micro-batch a little, or the engine's share. `homeostat estimate` shows what
fits.

## Known false alarms
An engine that reserves its cache beforehand fills the device on purpose; hence information only.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.memory.growth import gib
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(0.95, "Share of the device's memory that is almost full.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    total = float(view.facts["device_bytes"])
    used = {f"gpu {name}": s for name, s in view.matching("gpu/", "/memory_used").items()}
    own = view.series("memory/max_reserved")
    if own is not None and not used:
        used = {"the device": own}
    for name, series in used.items():
        peak = float(series.tail(5).values.max())
        if total <= 0 or peak <= options.max_share * total:
            continue
        yield Sighting(
            message=f"{name} holds {gib(peak)} of {gib(total)} ({peak / total:.0%}): the next long "
            "row may not fit. Lower trainer.max_tokens_per_device.",
            causes=(Cause("memory-near-limit", f"{peak / total:.0%} in use"),),
            fixes=(
                Fix(
                    "trainer.max_tokens_per_device",
                    "a tenth less",
                    "smaller micro-batches",
                    Grade.SAFE,
                ),
                Fix("engine.memory_share", "less", "leaves memory for the trainer", Grade.SAFE),
            ),
            first_step=int(series.steps[0]),
            last_step=int(series.steps[-1]),
            value=peak,
            limit=options.max_share * total,
            subject=name,
        )


RULE = Rule(
    code="MEM003",
    name="memory-near-limit",
    family=Family.MEMORY,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("fact:device_bytes",),
    options=Options,
)
