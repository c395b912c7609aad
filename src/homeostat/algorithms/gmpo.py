"""GMPO: geometric-mean policy optimisation (arXiv:2507.20673).

    x_it   = trainer_logp_it - old_logp_it
    c_it   = min(x_it, high) if A_i > 0, max(x_it, -low) if A_i < 0
    loss_i = -A_i * exp(mean_t(c_it))                         over the trained tokens of row i

The geometric mean of a completion's ratios, of which each is clipped by itself: one token with an
extreme ratio moves it little, and is bounded before it enters. The bounds are of the log-ratio.
Every token carries the loss of its row, so weights of 1 / length give the mean over sequences.
Advantages are those of GRPO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from homeostat.algorithms import grpo
from homeostat.algorithms.clip import ClipBounds, ratio_of
from homeostat.algorithms.normalise import row_means
from homeostat.algorithms.terms import PolicyTokens, Surrogate

if TYPE_CHECKING:
    from torch import Tensor

advantages = grpo.advantages


def surrogate(
    tokens: PolicyTokens, log_ratio_M: Tensor, params: Mapping[str, float | str]
) -> Surrogate:
    """Return the loss of each row, repeated at each of its tokens."""
    bounds = ClipBounds.of(params)
    assert bounds.dual == math.inf, "refused by config/combinations"
    advantage_M = tokens.advantage_M
    low_M = (advantage_M < 0) & (log_ratio_M < -bounds.low)
    high_M = (advantage_M > 0) & (log_ratio_M > bounds.high)
    bounded_M = log_ratio_M.masked_fill(low_M, -bounds.low).masked_fill(high_M, bounds.high)
    mean_B = row_means(bounded_M, tokens.row_of_M, tokens.num_rows)
    loss_M = -ratio_of(mean_B)[tokens.row_of_M] * advantage_M
    none_M = low_M.new_zeros(low_M.shape)
    return Surrogate(loss_M, ratio_of(log_ratio_M.detach()), low_M, high_M, dual_M=none_M)
