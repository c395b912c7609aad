"""GRPO: group-relative policy optimisation (arXiv:2402.03300).

    A_i     = (r_i - mean(r_group)) / (std(r_group) + 1e-4)       the same for all its tokens
    loss_it = -min(r_it * A_i, clip(r_it, 1 - low, 1 + high) * A_i)

normalised per sequence by default. The standard deviation is unbiased. `scale` can use that of the
whole batch instead, or none. A KL penalty in the reward is subtracted from r_i as a whole.
"""

from __future__ import annotations

from homeostat.algorithms import baselines
from homeostat.algorithms.baselines import RewardBatch
from homeostat.algorithms.clip import token_surrogate
from homeostat.arrays import FloatArray64
from homeostat.config.algorithm import PolicyGradientConfig

surrogate = token_surrogate


def advantages(config: PolicyGradientConfig, batch: RewardBatch) -> list[FloatArray64]:
    """Return the advantage of every completion token, per sample."""
    rewards_S = batch.sequence_rewards()
    centred_S = baselines.group_mean_off(rewards_S, batch.group_S)
    values_S = baselines.scaled(centred_S, rewards_S, batch.group_S, scale=config.scale)
    return baselines.per_token(values_S, batch.lengths_S)
