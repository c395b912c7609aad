"""How far a policy is from its reference: estimators per token, and a coefficient that adapts.

With tokens sampled from the policy, x = ref_logp - logp estimates KL(policy || reference) by

    k1 = -x                  unbiased, of high variance, also negative
    k2 = x^2 / 2             biased, of low variance, its gradient is the KL's
    k3 = exp(x) - 1 - x      unbiased, of low variance, never negative

(J. Schulman, "Approximating KL Divergence", 2020). Differentiated as a term of the loss, k1 has
gradient 0 in expectation; weighted by the ratio of new to old policy, k1 and k3 have the KL's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from homeostat.algorithms.clip import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor

MAX_ERROR = 0.2


def k1(logp_M: Tensor, ref_logp_M: Tensor) -> Tensor:
    return logp_M - ref_logp_M


def k2(logp_M: Tensor, ref_logp_M: Tensor) -> Tensor:
    return 0.5 * (logp_M - ref_logp_M) ** 2


def k3(logp_M: Tensor, ref_logp_M: Tensor) -> Tensor:
    """By expm1: near 0, where it is x^2 / 2, exp(x) - 1 would leave nothing but rounding."""
    x_M = (ref_logp_M - logp_M).clamp(max=MAX_LOG_RATIO)
    return x_M.expm1() - x_M


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def next_coefficient(
    coefficient: float, *, kl: float, target: float, horizon: int, num_samples: int
) -> float:
    """The coefficient after a step that measured `kl` (D. Ziegler et al., arXiv:1909.08593).

    It moves by at most a fifth per `horizon` samples, and per step. A measurement that is not
    finite says nothing, so the coefficient stays.
    """
    if not math.isfinite(kl):
        return coefficient
    error = max(-MAX_ERROR, min(MAX_ERROR, kl / target - 1))
    return coefficient * (1 + error * min(1.0, num_samples / horizon))
