"""One sample per prompt: there is no group to compare it with.

## What it sees
A group-relative algorithm (GRPO and its kin) with one sample per prompt.

## Why it matters
An advantage is an answer's reward less its group's mean. Of one answer it is 0, or NaN where it is
divided by the deviation: nothing is learned.

## Likely causes
- group-size-one: the number of samples was left at 1.

## What to do
Sample at least 2 answers per prompt; 8 or 16 give better estimates.

## Known false alarms
Algorithms with a value model or a global baseline (PPO, REINFORCE++) need no group; they are not
judged.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import raw
from homeostat.health.view import Kind, RunView

_GROUPED = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    if view.number("rollout.samples_per_prompt") != 1:
        return
    kind = view.setting("algorithm.type") or raw(view, "adv_estimator", "advantage_estimator")
    kind = kind or raw(view, "rlhf_type")
    if str(kind).lower() not in _GROUPED:
        return
    yield Sighting(
        message=f"{kind} compares the answers of one prompt, but only 1 is sampled: every "
        "advantage is 0. Sample at least 2, better 8.",
        causes=(Cause("group-size-one", "one sample has no group to differ from"),),
        fixes=(Fix("rollout.samples_per_prompt", "8", "answers to compare", Grade.UNSAFE),),
        value=1.0,
        limit=2.0,
    )


RULE = Rule(
    code="CFG002",
    name="group-size-one",
    family=Family.CONFIG,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("setting:rollout.samples_per_prompt",),
    kinds=(Kind.RL,),
    explains=("RWD001", "LRN008", "POL015"),
)
