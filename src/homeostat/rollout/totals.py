"""Computes the rewards that are trained on: weighted sums, normalised by the run so far, clipped.

All groups of a round are added to the run's moments together, in the order of drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from homeostat.config.rewards import RewardsConfig
from homeostat.rewards.combine import RewardMoments, finish
from homeostat.rewards.groups import ScoredGroup
from homeostat.types import RolloutGroup


def with_totals(
    groups: Sequence[RolloutGroup], config: RewardsConfig, moments: RewardMoments
) -> list[RolloutGroup]:
    """Return the groups with every sample's `reward`, after adding them to `moments`."""
    labels = [reward.label for reward in config.trained]
    if not labels:
        # The trainer computes the rewards of these samples (run/learning/energies.py).
        return list(groups)
    sums = finish([_scored(group, labels) for group in groups], config, moments)
    return [
        replace(
            group,
            samples=tuple(
                replace(sample, reward=reward)
                for sample, reward in zip(group.samples, rewards_G, strict=True)
            ),
        )
        for group, rewards_G in zip(groups, sums, strict=True)
    ]


def _scored(group: RolloutGroup, labels: Sequence[str]) -> ScoredGroup:
    samples = group.samples
    return ScoredGroup(
        {label: [sample.rewards[label] for sample in samples] for label in labels},
        {
            label: frozenset(n for n, sample in enumerate(samples) if label in sample.failed)
            for label in labels
        },
    )
