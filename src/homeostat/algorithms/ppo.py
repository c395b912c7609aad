"""PPO with a critic: generalised advantage estimation (arXiv:1707.06347, arXiv:1506.02438).

    r_t     = -penalty_t, plus the sample's reward at its last token
    delta_t = r_t + gamma * V_(t+1) - V_t
    A_t     = delta_t + gamma * lambda * A_(t+1)           whitened over all trained tokens
    R_t     = A_t + V_t                                    what the critic is trained towards
    loss as in GRPO

V_t is the critic's value of the state in which token t was chosen, before the step's updates. After
the last token it is 0, because the completion is over; after one that was cut off it may be the
critic's value of all that was written (`critic.bootstrap_truncated`). Only tokens that the policy
sampled count as steps: what a tool writes in between belongs to the next state.

Everything is float64 on the controller.
"""

from __future__ import annotations

import numpy as np

from homeostat.algorithms.baselines import RewardBatch, has_signal
from homeostat.algorithms.clip import token_surrogate
from homeostat.algorithms.reinforce_pp import discounted_returns
from homeostat.arrays import FloatArray64
from homeostat.config.algorithm import PpoConfig

surrogate = token_surrogate


def advantages(config: PpoConfig, batch: RewardBatch) -> list[FloatArray64]:
    """Return the advantage of every completion token, per sample; the caller whitens them."""
    critic = batch.critic
    assert critic is not None, "PPO needs the critic's values"
    return [
        gae(
            token_rewards(score, penalty_T),
            values_T,
            last_value=last_value,
            gamma=critic.gamma,
            gae_lambda=critic.gae_lambda,
        )
        for score, penalty_T, values_T, last_value in zip(
            batch.rewards_S, batch.penalties(), critic.values_ST, critic.last_S, strict=True
        )
    ]


def gae(
    rewards_T: FloatArray64,
    values_T: FloatArray64,
    *,
    last_value: float,
    gamma: float,
    gae_lambda: float,
) -> FloatArray64:
    """Return the generalised advantage of every token of one completion."""
    next_T = np.append(values_T[1:], last_value)[: len(values_T)]
    advantages_T = rewards_T + gamma * next_T - values_T
    # Backwards, because each advantage includes the discounted one after it.
    for token in range(len(advantages_T) - 2, -1, -1):
        advantages_T[token] += gamma * gae_lambda * advantages_T[token + 1]
    return advantages_T


def token_rewards(score: float, penalty_T: FloatArray64) -> FloatArray64:
    """Return what each token earns: its penalty, and at the last one the sample's reward."""
    rewards_T = -penalty_T
    if len(rewards_T):
        rewards_T[-1] += score
    return rewards_T


def earned(batch: RewardBatch) -> list[FloatArray64]:
    """Return what each token still earned: the sum of all later rewards, discounted.

    Unlike the critic's targets it holds no value of the critic (except one at a cut end), so that
    a critic can be measured by it.
    """
    critic = batch.critic
    assert critic is not None, "PPO needs the critic's values"
    ends_S = batch.rewards_S + critic.gamma * critic.last_S
    return [
        discounted_returns(end, penalty_T, discount=critic.gamma)
        for end, penalty_T in zip(ends_S, batch.penalties(), strict=True)
    ]


def explained_variance(values_M: FloatArray64, earned_M: FloatArray64) -> float | None:
    """Return 1 - Var(earned - value) / Var(earned); None if all earned the same.

    1: the critic knows what every token earns. 0: it knows no more than a constant. Below 0: it is
    worse than a constant.
    """
    if not has_signal(earned_M):
        return None
    return float(1.0 - np.var(earned_M - values_M) / np.var(earned_M))
