"""GSPO: group sequence policy optimisation (arXiv:2507.18071).

    s_i    = exp(mean_t(trainer_logp_it - old_logp_it))        over the trained tokens of row i
    loss_i = -min(s_i * A_i, clip(s_i, 1 - low, 1 + high) * A_i)

There is one ratio per sequence, as there is one reward per sequence, so a sequence is clipped as a
whole. Every token carries the loss of its row, so weights of 1 / length give the mean over
sequences. The gradient flows through the mean; if the advantage is the same for all tokens of a
row, this is also the gradient of GSPO-token. Advantages are those of GRPO.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from homeostat.algorithms import grpo
from homeostat.algorithms.clip import ClipBounds, clipped, ratio_of
from homeostat.algorithms.normalise import row_means
from homeostat.algorithms.terms import PolicyTokens, Surrogate

if TYPE_CHECKING:
    from torch import Tensor

advantages = grpo.advantages


def surrogate(
    tokens: PolicyTokens, log_ratio_M: Tensor, params: Mapping[str, float | str]
) -> Surrogate:
    """Return the clipped loss with the ratio of each row, repeated at each of its tokens."""
    mean_B = row_means(log_ratio_M, tokens.row_of_M, tokens.num_rows)
    ratio_M = ratio_of(mean_B)[tokens.row_of_M]
    return clipped(ratio_M, tokens.advantage_M, ClipBounds.of(params))
