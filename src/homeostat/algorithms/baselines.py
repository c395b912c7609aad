"""Compute advantages: compare rewards with a baseline and divide by a standard deviation.

Rewards are in sample order (`_S`); `group_S` says which samples answer the same prompt, in any
order. A NaN is a sample without a reward: it enters no statistic, and its advantage is 0.
Statistics are over the rewards of all samples that have one, trained or not; standard deviations
are unbiased (n - 1).

Equal rewards have advantage exactly 0. Subtracting a rounded mean from eight rewards of 0.1 would
leave 1e-17, and dividing by a standard deviation of the same size would turn that into a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from homeostat.algorithms.energy import Energies
from homeostat.arrays import BoolArray, FloatArray64, IntArray

# Added to a standard deviation before dividing: bounds the advantages of nearly equal rewards.
DEVIATION_EPS = 1e-4
# The same for whitening. Its scale is unknown, so this only prevents 0 / 0 after an underflow.
WHITEN_EPS = 1e-8
# Rewards that differ by less than this, relative to the largest, differ only by rounding.
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class CriticValues:
    """The critic's values: of the state in which each token was chosen, and after the last one.

    `last_S` is 0 where the completion is over.
    """

    values_ST: list[FloatArray64]
    last_S: FloatArray64
    gamma: float
    gae_lambda: float


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """The inputs from which the advantages of a step's samples are computed.

    `lengths_S` counts completion tokens. `trained_S` is False for masked samples, whose rewards
    still count in their groups. `penalty_ST` is the KL penalty of every completion token, including
    the coefficient, if it is subtracted from the rewards. `critic` is there if the algorithm has
    one. `energies` are part of the rewards, where a run has them.
    """

    rewards_S: FloatArray64
    group_S: IntArray
    lengths_S: IntArray
    trained_S: BoolArray
    penalty_ST: list[FloatArray64] | None
    critic: CriticValues | None = None
    energies: Energies | None = None

    def __post_init__(self) -> None:
        sizes = {len(self.rewards_S), len(self.group_S), len(self.lengths_S), len(self.trained_S)}
        assert len(sizes) == 1, f"arrays of one batch have {sizes} samples"
        assert not np.isinf(self.rewards_S).any(), "a reward is infinite"
        if self.penalty_ST is not None:
            found = [len(penalty_T) for penalty_T in self.penalty_ST]
            assert found == self.lengths_S.tolist(), f"{found} penalties, {self.lengths_S} tokens"

    @property
    def known_S(self) -> BoolArray:
        """Return a mask of the samples that have a reward."""
        return ~np.isnan(self.rewards_S)

    def penalties(self) -> list[FloatArray64]:
        """Return the KL penalty of every token; 0 if it is not in the rewards."""
        return self.penalty_ST or [np.zeros(length) for length in self.lengths_S]

    def sequence_rewards(self) -> FloatArray64:
        """Return the reward of each completion minus the penalties of all its tokens."""
        if self.penalty_ST is None:
            return self.rewards_S
        return self.rewards_S - np.array([penalty_T.sum() for penalty_T in self.penalty_ST])


def has_signal(rewards_G: FloatArray64) -> bool:
    """Return whether the known rewards of a group differ: only then is there a signal."""
    known_G = rewards_G[~np.isnan(rewards_G)]
    if len(known_G) < 2:
        return False
    # Relative to the largest: rewards of 1e6 and of 1e-3 round by different amounts.
    return bool(np.ptp(known_G) > ROUNDING * np.abs(known_G).max())


def signal_S(rewards_S: FloatArray64, group_S: IntArray) -> BoolArray:
    """Return a mask of the samples that have a reward, in groups whose rewards differ."""
    found_S = np.zeros(len(rewards_S), dtype=bool)
    for members in _groups_with_signal(rewards_S, group_S):
        found_S[members] = True
    return found_S


def group_mean_off(rewards_S: FloatArray64, group_S: IntArray) -> FloatArray64:
    """Return r_i - mean of its group."""
    centred_S = np.zeros(len(rewards_S))
    for members in _groups_with_signal(rewards_S, group_S):
        centred_S[members] = rewards_S[members] - rewards_S[members].mean()
    return centred_S


def leave_one_out(rewards_S: FloatArray64, group_S: IntArray) -> FloatArray64:
    """Return r_i - mean of the other samples of its group."""
    centred_S = np.zeros(len(rewards_S))
    for members in _groups_with_signal(rewards_S, group_S):
        rewards_G = rewards_S[members]
        # A group with a signal has at least two members, so this does not divide by zero.
        others_G = (rewards_G.sum() - rewards_G) / (len(members) - 1)
        centred_S[members] = rewards_G - others_G
    return centred_S


def scaled(
    centred_S: FloatArray64,
    rewards_S: FloatArray64,
    group_S: IntArray,
    *,
    scale: Literal["group", "batch", "none"],
) -> FloatArray64:
    """Divide advantages by the standard deviation of the rewards in the group or the batch."""
    if scale == "none" or not has_signal(rewards_S):
        return centred_S
    if scale == "batch":
        return centred_S / (np.nanstd(rewards_S, ddof=1) + DEVIATION_EPS)
    scaled_S = centred_S.copy()
    for members in _groups_with_signal(rewards_S, group_S):
        scaled_S[members] /= rewards_S[members].std(ddof=1) + DEVIATION_EPS
    return scaled_S


def per_token(values_S: FloatArray64, lengths_S: IntArray) -> list[FloatArray64]:
    """Repeat the value of a sample for every token of its completion."""
    return [np.full(length, value) for value, length in zip(values_S, lengths_S, strict=True)]


def whitened(values_ST: list[FloatArray64], counted_S: BoolArray) -> list[FloatArray64]:
    """Scale to mean 0 and standard deviation 1 over all tokens of the counted samples.

    The deviation divides by n, not n - 1.
    """
    counted = [values_T for values_T, counts in zip(values_ST, counted_S, strict=True) if counts]
    values_M = np.concatenate(counted) if counted else np.zeros(0)
    if not has_signal(values_M):
        return [np.zeros_like(values_T) for values_T in values_ST]
    # Divide by n, unlike the statistics of rewards above, which divide by n - 1.
    mean, deviation = values_M.mean(), values_M.std()
    return [(values_T - mean) / (deviation + WHITEN_EPS) for values_T in values_ST]


def _groups_with_signal(rewards_S: FloatArray64, group_S: IntArray) -> Iterator[IntArray]:
    """Yield the samples with a reward, group by group, without groups of equal rewards."""
    known_S = ~np.isnan(rewards_S)
    for group in np.unique(group_S):
        members = np.flatnonzero((group_S == group) & known_S)
        if has_signal(rewards_S[members]):
            yield members
