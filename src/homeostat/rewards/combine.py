"""Combine the values of several rewards into the one number per sample that is trained on.

    values per reward -> some standardised -> weighted sum -> normalised by the run -> clipped

A reward that returns None for a sample does not apply to it and is left out of the sum, as in TRL.
A reward that *failed* (it raised, timed out, died, or gave no finite number) is different: nobody
knows what the sample deserved, so the sample has no sum at all and is not trained. Leaving the
failed reward out would count it as 0, and a correct answer whose check timed out would be punished.
A reward of weight 0 is only recorded: its failures change nothing.

The moments are part of the run's state: they are checkpointed, and a resumed run continues with the
same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from homeostat.config.rewards import RewardsConfig
from homeostat.rewards.groups import ScoredGroup

Mode = Literal["none", "scale", "standardise"]
# A standard deviation this small relative to the mean is only the rounding of equal rewards.
SMALLEST_DEVIATION = 1e-9


def weighted_sum(
    values: Mapping[str, float | None],
    weights: Mapping[str, float],
    *,
    failed: Collection[str] = (),
) -> float | None:
    """Return the sum over the rewards that apply; None if none applies or a weighted one failed."""
    if any(weights[label] != 0 for label in failed):
        return None
    terms = [weights[label] * value for label, value in values.items() if value is not None]
    # fsum does not depend on the order of the rewards.
    return math.fsum(terms) if terms else None


def totals(scored: Sequence[ScoredGroup], config: RewardsConfig) -> list[list[float | None]]:
    """Return the weighted sum of every sample, group by group."""
    weights = {reward.label: reward.weight for reward in config.trained}
    return [
        [
            weighted_sum(
                dict(zip(group.values, column, strict=True)),
                weights,
                failed=group.failed_on(sample),
            )
            for sample, column in enumerate(zip(*group.values.values(), strict=True))
        ]
        for group in scored
    ]


@dataclass(slots=True)
class RunningMoments:
    """Count, mean and sum of squared differences from the mean, over all rewards so far.

    Batches are merged with the formula of Chan, Golub and LeVeque, which avoids cancellation
    however long the run is.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def deviation(self) -> float:
        """Return the unbiased standard deviation; 0 for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values: Sequence[float]) -> None:
        """Add a batch of rewards."""
        if not values:
            return
        num = len(values)
        mean = math.fsum(values) / num
        squares = math.fsum((value - mean) ** 2 for value in values)
        total = self.count + num
        shift = mean - self.mean
        # The second term accounts for the distance between the two means.
        self.squares += squares + shift * shift * (self.count * num / total)
        self.mean += shift * (num / total)
        self.count = total

    def apply(self, rewards: Sequence[float | None], mode: Mode) -> list[float | None]:
        """Add the rewards, then normalise them by everything seen so far."""
        # Include the current rewards, so that the first step is normalised, too.
        self.update([reward for reward in rewards if reward is not None])
        if mode == "none":
            return list(rewards)
        mean = self.mean if mode == "standardise" else 0.0
        deviation = self.deviation
        # If all rewards so far are equal, dividing would only amplify rounding.
        scale = deviation if deviation > SMALLEST_DEVIATION * abs(self.mean) else 1.0
        return [None if reward is None else (reward - mean) / scale for reward in rewards]

    def as_json(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @classmethod
    def from_json(cls, raw: Mapping[str, float]) -> RunningMoments:
        return cls(int(raw["count"]), float(raw["mean"]), float(raw["squares"]))


@dataclass(slots=True)
class RewardMoments:
    """The moments of a run: of the sums, and of each reward that is standardised by itself."""

    total: RunningMoments = field(default_factory=RunningMoments)
    own: dict[str, RunningMoments] = field(default_factory=dict)


def standardised(
    scored: Sequence[ScoredGroup], config: RewardsConfig, moments: RewardMoments
) -> list[ScoredGroup]:
    """Standardise the rewards that ask for it by all their values so far, these included."""
    values = [dict(group.values) for group in scored]
    for label in (reward.label for reward in config.trained if reward.standardises):
        own = moments.own.setdefault(label, RunningMoments())
        flat = [value for group in scored for value in group.values[label]]
        rest = iter(own.apply(flat, "standardise"))
        for group, found in zip(scored, values, strict=True):
            found[label] = [next(rest) for _ in group.values[label]]
    return [replace(group, values=found) for group, found in zip(scored, values, strict=True)]


def finish(
    scored: Sequence[ScoredGroup], config: RewardsConfig, moments: RewardMoments
) -> list[list[float | None]]:
    """Return the rewards to train on, per group and sample. Adds them to `moments`."""
    sums = totals(standardised(scored, config, moments), config)
    rewards = moments.total.apply([reward for group in sums for reward in group], config.normalise)
    if (bound := config.clip) is not None:
        rewards = [None if r is None else min(bound, max(-bound, r)) for r in rewards]
    rest = iter(rewards)
    return [[next(rest) for _ in group] for group in sums]
