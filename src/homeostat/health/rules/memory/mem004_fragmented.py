"""Far more device memory is reserved than is used.

## What it sees
Reserved memory above `factor` times allocated and by at least `min_bytes`, over the newest records.

## Why it matters
Blocks of changing sizes leave gaps. An allocation then fails although the free memory would be
enough in total.

## Likely causes
- memory-fragmented: lengths differ from step to step.

## What to do
Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; pack micro-batches to an equal number of
tokens.

## Known false alarms
Engines in the same process reserve on purpose; hence information only.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.memory.growth import gib
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import RunView


class Options(RuleOptions):
    factor: float = option(1.6, "Factor over what is used.")
    min_bytes: int = option(8589934592, "Smallest number of bytes that matters.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    used, held = (
        needed(view, "memory/max_alloc").tail(5),
        needed(view, "memory/max_reserved").tail(5),
    )
    mine, all_of_it = median(used.values), median(held.values)
    if mine <= 0 or all_of_it < options.factor * mine or all_of_it - mine < options.min_bytes:
        return
    yield Sighting(
        message=f"{gib(all_of_it)} of device memory are reserved and {gib(mine)} used: the rest is "
        "in gaps. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        causes=(Cause("memory-fragmented", f"{all_of_it / mine:.1f} times what is used"),),
        fixes=(
            Fix("", "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF joins gaps", Grade.SAFE),
            Fix("trainer.packing", "true", "micro-batches of equal size", Grade.SAFE),
        ),
        first_step=int(used.steps[0]),
        last_step=int(used.steps[-1]),
        value=all_of_it,
        limit=options.factor * mine,
    )


RULE = Rule(
    code="MEM004",
    name="memory-fragmented",
    family=Family.MEMORY,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("memory/max_alloc", "memory/max_reserved"),
    options=Options,
)
