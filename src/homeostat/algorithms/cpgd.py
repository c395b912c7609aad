"""CPGD: clipped policy gradient with policy drift (arXiv:2505.12504).

    x_it    = trainer_logp_it - old_logp_it
    loss_it = -min(x_it * A_i, clip(x_it, ln(1 - low), ln(1 + high)) * A_i) + drift * d(x_it)
    d(x)    = exp(x) - 1 - x,  above ln(1 + drift_clip) continued with the slope drift_clip

The log-ratio takes the place of PPO's ratio, so that a token whose ratio has grown is not weighted
by it. The drift estimates KL(old || new) on the samples of the old policy (k3): it holds the policy
back also where nothing is clipped. Its slope is r - 1, which the bound keeps from growing with the
ratio. Advantages are those of GRPO: of each prompt's own group, never of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from homeostat.algorithms import grpo
from homeostat.algorithms.clip import ClipBounds, ratio_of
from homeostat.algorithms.terms import PolicyTokens, Surrogate

if TYPE_CHECKING:
    from torch import Tensor

advantages = grpo.advantages


def surrogate(
    tokens: PolicyTokens, log_ratio_M: Tensor, params: Mapping[str, float | str]
) -> Surrogate:
    """Return the clipped policy gradient with the drift penalty of each token."""
    bounds = ClipBounds.of(params)
    assert bounds.dual == math.inf, "refused by config/combinations"
    advantage_M, ratio_M = tokens.advantage_M, ratio_of(log_ratio_M.detach())
    low_M = (advantage_M < 0) & (ratio_M < 1 - bounds.low)
    high_M = (advantage_M > 0) & (ratio_M > 1 + bounds.high)
    # A constant has no gradient, which is what clipping means here.
    bounded_M = log_ratio_M.masked_fill(low_M, math.log1p(-bounds.low))
    bounded_M = bounded_M.masked_fill(high_M, math.log1p(bounds.high))
    loss_M = -bounded_M * advantage_M
    if params["drift"]:
        loss_M = loss_M + float(params["drift"]) * drift(log_ratio_M, float(params["drift_clip"]))
    return Surrogate(loss_M, ratio_M, low_M, high_M, dual_M=low_M.new_zeros(low_M.shape))


def drift(log_ratio_M: Tensor, bound: float) -> Tensor:
    """Return the k3 estimate of KL(old || new), with a slope of at most `bound`."""
    edge = math.log1p(bound)
    # Clamped, because a branch that is not taken must not overflow either.
    within_M = log_ratio_M.clamp(max=edge).expm1() - log_ratio_M
    beyond_M = bound - edge + bound * (log_ratio_M - edge)
    return beyond_M.where(log_ratio_M > edge, within_M)
