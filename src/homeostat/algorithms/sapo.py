"""SAPO: soft adaptive policy optimisation (arXiv:2511.20347).

    loss_it = -A_i * 4 / tau * sigmoid(tau * (r_it - 1))     tau: tau_pos if A_i > 0, else tau_neg

A soft gate takes the place of the clip: the weight of a token falls off smoothly as its ratio
leaves 1, and never to exactly 0. At r = 1 the gradient is that of the policy gradient, whatever tau
is. A larger tau for negative advantages makes these, which raise the logits of many other tokens at
once, fall off faster. Nothing is clipped, so the counts of clipped tokens are 0. Advantages are
those of GRPO.
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
    """Return the gated loss of each token."""
    assert ClipBounds.of(params).dual == math.inf, "refused by config/combinations"
    ratio_M, advantage_M = ratio_of(log_ratio_M), tokens.advantage_M
    temperatures = (float(params[name]) for name in ("tau_pos", "tau_neg"))
    pos_M, neg_M = (advantage_M.new_full(advantage_M.shape, tau) for tau in temperatures)
    tau_M = pos_M.where(advantage_M > 0, neg_M)
    gate_M = (tau_M * (ratio_M - 1)).sigmoid() * 4 / tau_M
    none_M = (advantage_M != advantage_M).new_zeros(advantage_M.shape)
    return Surrogate(-gate_M * advantage_M, ratio_M.detach(), none_M, none_M, none_M)
