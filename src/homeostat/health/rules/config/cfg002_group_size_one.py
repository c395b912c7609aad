"""One sample per prompt: there is no group to compare it with.

## What it sees
A group-relative algorithm (GRPO and similar) with one sample per prompt.

## Why it matters
An advantage is an answer's reward minus the mean of its group. With a single answer it is 0, or NaN
if it is divided by the standard deviation, so nothing is learned.

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

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import raw
from homeostat.health.view import Kind, RunView

_GROUPED = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "cpgd", "sapo", "gmpo")


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    if view.number("rollout.samples_per_prompt") != 1:
        return
    kind = view.setting("algorithm.type") or raw(view, "adv_estimator", "advantage_estimator")
    kind = kind or raw(view, "rlhf_type") or _seen(view)
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


def _seen(view: RunView) -> str:
    """GRPO, where nothing names the algorithm but a spread within groups is logged and is never
    there, while rewards vary."""
    spread, reward = view.series("reward_std"), view.series("reward")
    if spread is None or reward is None or len(reward) < 3:
        return ""
    has_spread = bool(np.any(np.isfinite(spread.values) & (spread.values > 0.0)))
    return "" if has_spread or np.ptp(reward.finite().values) == 0.0 else "GRPO"


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
