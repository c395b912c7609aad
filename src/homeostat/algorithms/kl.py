"""Estimators of the KL divergence per token, and an adaptive coefficient.

With tokens sampled from the policy, x = ref_logp - logp estimates KL(policy || reference) by

    k1 = -x                  unbiased, high variance, can be negative
    k2 = x^2 / 2             biased, low variance, its gradient is that of the KL
    k3 = exp(x) - 1 - x      unbiased, low variance, never negative

(J. Schulman, "Approximating KL Divergence", 2020). As a term of the loss, k1 has gradient 0 in
expectation; weighted by the ratio of new to old policy, k1 and k3 have the gradient of the KL.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from homeostat.algorithms.clip import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor

MAX_ERROR = 0.2


def k1(logp_M: Tensor, ref_logp_M: Tensor) -> Tensor:
    """Return the k1 estimate."""
    return logp_M - ref_logp_M


def k2(logp_M: Tensor, ref_logp_M: Tensor) -> Tensor:
    """Return the k2 estimate."""
    return 0.5 * (logp_M - ref_logp_M) ** 2


def k3(logp_M: Tensor, ref_logp_M: Tensor) -> Tensor:
    """Return the k3 estimate.

    It uses expm1: near 0, where k3 is x^2 / 2, exp(x) - 1 would leave only rounding errors.
    """
    # One token that the reference finds far more likely must not make the loss infinite.
    x_M = (ref_logp_M - logp_M).clamp(max=MAX_LOG_RATIO)
    return x_M.expm1() - x_M


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def next_coefficient(
    coefficient: float, *, kl: float, target: float, horizon: int, num_samples: int
) -> float:
    """Return the coefficient after a step that measured `kl` (D. Ziegler et al., arXiv:1909.08593).

    It changes by at most a fifth per `horizon` samples, and per step. A measurement that is not
    finite is ignored, so the coefficient stays.
    """
    if not math.isfinite(kl):
        return coefficient
    # Bounded, so that one noisy measurement cannot change the coefficient much.
    error = max(-MAX_ERROR, min(MAX_ERROR, kl / target - 1))
    return coefficient * (1 + error * min(1.0, num_samples / horizon))
