"""Device memory grows step after step.

## What it sees
The peak of device memory rises steadily over at least `min_records` records: in all by
`min_growth`, and still in the second half, while rows do not get longer.

## Why it matters
The run ends in an out-of-memory error hours later, at a step that has nothing to do with the leak.

## Likely causes
- gpu-memory-leak: tensors are kept: losses with their graph, caches, samples on the device.
- vllm-sleep-leak: an engine in the same process frees less than it takes.
- memory-fragmented: reserved memory grows while allocated does not.

## What to do
Take memory snapshots a few steps apart (observe.profiler.memory) and compare what is held.

## Known false alarms
The peak naturally grows until the longest row was seen; therefore it must also grow in the second
half.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.memory.growth import gib, leak
from homeostat.health.rules.readings import needed
from homeostat.health.view import RunView


class Options(RuleOptions):
    min_growth: float = option(0.1, "Growth in all, as a share.")
    min_records: int = option(12, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    used = needed(view, "memory/max_alloc", "memory/max_reserved").finite()
    if view.setting("trainer.device") == "cpu" or len(used) < options.min_records:
        return
    growth = leak(view, used, options.min_growth)
    if growth is None:
        return
    slept = bool(view.events_of("engine_slept")) or view.series("memory/after_sleep") is not None
    causes = [Cause("gpu-memory-leak", f"{growth.per_step / 2**20:.3g} MiB a step")]
    if slept:
        causes.insert(0, Cause("vllm-sleep-leak", "an engine sleeps in the same run"))
    yield Sighting(
        message=f"Device memory grows from {gib(growth.first)} to {gib(growth.last)}, about "
        f"{growth.per_step / 2**20:.3g} MiB a step, and does not stop: it will run out. Compare "
        "memory snapshots a few steps apart.",
        causes=tuple(causes),
        fixes=(
            Fix("observe.profiler.memory", "true", "shows what is held"),
            Fix(
                "trainer.empty_cache_interval",
                "1",
                "releases memory that is cached and not used",
                Grade.SAFE,
            ),
        ),
        first_step=int(used.steps[0]),
        last_step=int(used.steps[-1]),
        value=growth.last,
        limit=growth.first,
    )


RULE = Rule(
    code="MEM001",
    name="gpu-memory-leak",
    family=Family.MEMORY,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("memory/max_alloc|memory/max_reserved",),
    options=Options,
)
