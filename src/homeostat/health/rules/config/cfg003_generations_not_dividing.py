"""A batch cannot be cut into whole groups.

## What it sees
As TRL counts: devices times rows per device times accumulation is not a multiple of the generations
per prompt.

## Why it matters
Groups would be split; trainers refuse to start.

## Likely causes
- generations-not-dividing-batch: sizes that were changed one at a time.

## What to do
Make rows per device times devices a multiple of the generations. homeostat counts its batches in
prompts, so its sizes always agree.

## Known false alarms
Trainers that count their batch in prompts.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import raw_number
from homeostat.health.view import Kind, RunView

_ROWS = ("per_device_train_batch_size", "micro_batch_size")


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    group = raw_number(view, "num_generations")
    if group is None or view.framework.name not in ("trl", "axolotl", "ms_swift", "unsloth"):
        return
    size = raw_number(view, "generation_batch_size")
    if size is None:
        rows = raw_number(view, *_ROWS)
        devices = raw_number(view, "num_processes", "world_size", "nproc_per_node")
        if rows is None or devices is None:
            return
        accumulated = raw_number(view, "steps_per_generation", "gradient_accumulation_steps")
        size = rows * devices * (accumulated or 1)
    if group < 2 or size % group == 0:
        return
    yield Sighting(
        message=f"A batch of {size:g} samples cannot hold whole groups of {group:g}: make it a "
        "multiple.",
        causes=(Cause("generations-not-dividing-batch", f"{size:g} is no multiple of {group:g}"),),
        fixes=(
            Fix(
                "rollout.samples_per_prompt",
                "a divisor of the batch",
                "whole groups",
                Grade.UNSAFE,
                theirs={"trl": "num_generations", "ms_swift": "num_generations"},
            ),
        ),
        value=size,
        limit=group,
    )


RULE = Rule(
    code="CFG003",
    name="generations-not-dividing-batch",
    family=Family.CONFIG,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    kinds=(Kind.RL,),
)
