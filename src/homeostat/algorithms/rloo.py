"""RLOO: REINFORCE leave-one-out (arXiv:2402.14740).

    A_i  = r_i - mean(r_j of the group, j != i)
    loss = sum_it -A_i * log pi(y_it) / (completions * fixed_length)

The baseline does not depend on the sample, so the gradient is unbiased. It is the gradient of the
sum over a completion's tokens; hence `normalise=fixed`. The first update after sampling has exactly
this gradient. Later ones reuse the samples: the token's ratio, clipped as in PPO, replaces its
log-prob.
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
    centred_S = baselines.leave_one_out(rewards_S, batch.group_S)
    values_S = baselines.scaled(centred_S, rewards_S, batch.group_S, scale=config.scale)
    return baselines.per_token(values_S, batch.lengths_S)
