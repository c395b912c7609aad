"""The kind of activation checkpointing does not fit the sharding.

## What it sees
Non-re-entrant gradient checkpointing with DeepSpeed ZeRO-3.

## Why it matters
ZeRO-3 frees and gathers weights between the passes; the non-re-entrant kind compares the tensors
that it saved with those that it recomputes, finds that they differ, and raises CheckpointError.

## Likely causes
- checkpointing-mode-mismatch: the default, which is right in all other cases, was kept.

## What to do
Set use_reentrant: true with ZeRO-3; our own FSDP2 trainer needs no setting.

## Known false alarms
Versions of DeepSpeed in which both kinds work; the finding is therefore only information until the
run fails.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import is_false, raw, raw_number
from homeostat.health.view import RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    stage = raw_number(view, "zero_optimization.stage", "zero_stage", "stage")
    config = str(raw(view, "deepspeed", "deepspeed_config") or "").lower()
    is_three = stage == 3 or "zero3" in config or "zero_3" in config
    reentrant = raw(view, "gradient_checkpointing_kwargs.use_reentrant", "use_reentrant")
    if not is_three or not is_false(reentrant):
        return
    yield Sighting(
        message="Non-re-entrant gradient checkpointing with ZeRO-3 fails with a CheckpointError in "
        "many versions. Set use_reentrant to true.",
        causes=(Cause("checkpointing-mode-mismatch", "ZeRO-3 gathers weights between the passes"),),
        fixes=(
            Fix(
                "",
                "true",
                "the re-entrant kind does not compare tensors",
                Grade.SAFE,
                theirs={
                    "axolotl": 'gradient_checkpointing_kwargs={"use_reentrant": true}',
                    "trl": 'gradient_checkpointing_kwargs={"use_reentrant": true}',
                    "transformers": 'gradient_checkpointing_kwargs={"use_reentrant": true}',
                },
            ),
        ),
    )


RULE = Rule(
    code="CFG010",
    name="checkpointing-mode-mismatch",
    family=Family.CONFIG,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
)
