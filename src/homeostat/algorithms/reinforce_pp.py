"""REINFORCE++: returns per token, normalised over the batch (arXiv:2501.03262).

    r_it = -penalty_it, plus r_i at the last token
    A_it = r_it + discount * A_i(t+1)                 then whitened over all trained tokens
    loss as in GRPO

No groups are needed: a sample is compared with the whole batch, and whitening scales the result.
With `baseline` (REINFORCE++-baseline) the group's mean is subtracted from r_i first. The KL penalty
is per token in both.
"""

from __future__ import annotations

from homeostat.algorithms import baselines
from homeostat.algorithms.baselines import RewardBatch
from homeostat.algorithms.clip import token_surrogate
from homeostat.arrays import FloatArray64
from homeostat.config.algorithm import ReinforcePpConfig

surrogate = token_surrogate


def advantages(config: ReinforcePpConfig, batch: RewardBatch) -> list[FloatArray64]:
    """Return the return of every completion token, per sample; the caller whitens them."""
    scores_S = batch.rewards_S
    if config.baseline:
        scores_S = baselines.group_mean_off(batch.rewards_S, batch.group_S)
    return [
        discounted_returns(score, penalty_T, discount=config.discount)
        for score, penalty_T in zip(scores_S, batch.penalties(), strict=True)
    ]


def discounted_returns(score: float, penalty_T: FloatArray64, *, discount: float) -> FloatArray64:
    """Return what every token still earns: the penalties from it on, and the score at the end."""
    returns_T = -penalty_T
    if len(returns_T):
        returns_T[-1] += score
    # Backwards, because each return includes the discounted one after it.
    for token in range(len(returns_T) - 2, -1, -1):
        returns_T[token] += discount * returns_T[token + 1]
    return returns_T
