"""The clipped surrogate of PPO (arXiv:1707.06347), with a bound for each side, and the dual clip.

    r_m    = exp(trainer_logp_m - old_logp_m)
    loss_m = -min(r_m * A_m, clip(r_m, 1 - low, 1 + high) * A_m)
    dual:    where A_m < 0, loss_m is at most -dual * A_m           (arXiv:1912.09729)

The minimum has three special cases, in each of which the ratio is a constant without gradient: A >
0 and r > 1 + high; A < 0 and r < 1 - low; with a dual clip, A < 0 and r > dual. Different values of
`high` and `low` are the "clip higher" of DAPO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from homeostat.algorithms.terms import PolicyTokens, Surrogate

if TYPE_CHECKING:
    from torch import Tensor

# exp(20) is 5e8, far beyond every clip range and far within float32. A NaN passes through.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class ClipBounds:
    """Bounds of the ratio. `dual` is infinite if there is no dual clip."""

    low: float
    high: float
    dual: float

    @classmethod
    def of(cls, params: Mapping[str, float | str]) -> ClipBounds:
        """Read the bounds from the parameters of a loss."""
        dual = float(params.get("dual_clip", math.inf))
        return cls(float(params["clip_low"]), float(params["clip_high"]), dual)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio) without overflow."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def clipped(ratio_M: Tensor, advantage_M: Tensor, bounds: ClipBounds) -> Surrogate:
    """Return the clipped loss for any kind of ratio."""
    low_M = (advantage_M < 0) & (ratio_M < 1 - bounds.low)
    high_M = (advantage_M > 0) & (ratio_M > 1 + bounds.high)
    dual_M = (advantage_M < 0) & (ratio_M > bounds.dual)
    # masked_fill gives a constant without gradient, which is what clipping means here.
    bounded_M = ratio_M.masked_fill(low_M, 1 - bounds.low).masked_fill(high_M, 1 + bounds.high)
    bounded_M = bounded_M.masked_fill(dual_M, bounds.dual)
    return Surrogate(-bounded_M * advantage_M, ratio_M.detach(), low_M, high_M, dual_M)


def token_surrogate(
    tokens: PolicyTokens, log_ratio_M: Tensor, params: Mapping[str, float | str]
) -> Surrogate:
    """Return the clipped loss with the ratio of each token."""
    return clipped(ratio_of(log_ratio_M), tokens.advantage_M, ClipBounds.of(params))
