"""Chance moves the reward more than learning does.

## What it sees
Over `fire` records the reward shows no trend, neighbouring records differ by `max_noise` of their
mean, and a step has fewer than `min_samples` samples.

## Why it matters
A gradient from a few samples has an almost random direction. The curve says nothing about progress,
and learning may take many times as many steps.

## Likely causes
- reward-too-noisy: too few prompts and samples in a step.

## What to do
Use more prompts per step, or more samples per prompt; judge progress on held-out prompts.

## Known false alarms
Prompts of very unequal difficulty. The finding is only information.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import samples_per_step, trend
from homeostat.health.series.noise import between_neighbours
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    fire: int = option(20, "Number of records that are needed.")
    max_noise: float = option(0.5, "Noise of a record, as a share of the mean, that is much.")
    min_samples: int = option(64, "Samples of a step below which more of them would help.")
    warn_samples: int = option(8, "Samples of a step below which nothing can be learned from it.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    reward, samples = view.series("reward"), samples_per_step(view)
    assert reward is not None, "needs says so"
    if samples is None:
        yield Unknown("how many samples a step has is not known")
        return
    tail, moved = reward.finite().tail(4 * options.fire), trend(reward)
    if len(tail) < options.fire or samples >= options.min_samples or moved is None:
        return
    mean = float(np.abs(tail.values).mean())
    noise = between_neighbours(tail.values)
    if moved.is_real or mean == 0.0 or noise < options.max_noise * mean:
        return
    yield Sighting(
        message=f"The reward varies by {noise:.3g} around {mean:.3g} from record to record "
        f"without a trend; a step has {samples:.0f} samples. More prompts would show one.",
        evidence=(f"{len(tail)} records, noise {noise / mean:.0%} of the mean",),
        causes=(Cause("reward-too-noisy", f"{samples:.0f} samples a step"),),
        fixes=(
            Fix(
                "rollout.prompts_per_step",
                "4 times as many",
                "chance then counts less",
                Grade.UNSAFE,
            ),
        ),
        first_step=int(tail.steps[0]),
        last_step=int(tail.steps[-1]),
        value=noise / mean,
        limit=options.max_noise,
        level=Level.WARN if samples < options.warn_samples else None,
    )


RULE = Rule(
    code="RWD010",
    name="reward-too-noisy",
    family=Family.REWARD,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
)
