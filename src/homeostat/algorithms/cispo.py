"""CISPO: clipped importance-sampling weights (MiniMax-M1, arXiv:2506.13585).

    loss_it = -sg(clip(r_it, 1 - low, 1 + high)) * A_i * trainer_logp_it

The weight is clipped, but never the gradient: a rare token that starts a reflection is still learnt
from after its ratio has left the range. The clip does not depend on the sign of the advantage, and
neither do its counts. low = 1 means that there is no lower bound. Advantages are those of GRPO.
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
    """Return the REINFORCE loss with a clipped weight per token.

    A dual clip has no meaning here.
    """
    bounds = ClipBounds.of(params)
    assert bounds.dual == math.inf, "a dual clip bounds a ratio's gradient, and CISPO has none"
    # Detached: the gradient comes from the log-prob alone, which is what "never clipped" means.
    ratio_M = ratio_of(log_ratio_M.detach())
    weight_M = ratio_M.clamp(1 - bounds.low, 1 + bounds.high)
    loss_M = -weight_M * tokens.advantage_M * tokens.trainer_logp_M
    low_M, high_M = ratio_M < 1 - bounds.low, ratio_M > 1 + bounds.high
    return Surrogate(loss_M, ratio_M, low_M, high_M, dual_M=low_M.new_zeros(low_M.shape))
