"""A token budget per device is set, and dynamic batches are off.

## What it sees
`max_tokens_per_gpu` without `use_dynamic_batch_size`.

## Why it matters
The budget has no effect: micro-batches are counted in rows, and a batch of long rows runs out of
memory.

## Likely causes
- token-budget-ignored: only one of two settings that belong together was set.

## What to do
Switch dynamic batches on. Our own trainer always packs by trainer.max_tokens_per_device.

## Known false alarms
None: this is the documented meaning of the flag.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import is_false, raw, raw_number
from homeostat.health.view import Kind, RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    budget = raw_number(view, "max_tokens_per_gpu", "ppo_max_token_len_per_gpu")
    switch = raw(view, "use_dynamic_batch_size", "use_dynamic_bsz")
    if budget is None or not is_false(switch):
        return
    yield Sighting(
        message=f"A budget of {budget:g} tokens per device is set, but dynamic batches are off: it "
        "has no effect. Switch them on.",
        causes=(Cause("token-budget-ignored", "micro-batches are counted in rows"),),
        fixes=(
            Fix(
                "trainer.packing",
                "true",
                "batches are then sized by tokens",
                Grade.SAFE,
                theirs={
                    "slime": "--use-dynamic-batch-size",
                    "miles": "--use-dynamic-batch-size",
                    "verl": "actor_rollout_ref.actor.use_dynamic_bsz",
                },
            ),
        ),
        value=budget,
    )


RULE = Rule(
    code="CFG012",
    name="token-budget-ignored",
    family=Family.CONFIG,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    kinds=(Kind.RL,),
)
