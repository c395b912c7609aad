"""The one definition of how top-k, top-p and min-p cut a distribution.

    order     tokens by logit, the largest first; of equal ones the lower token id is first
    top-k     the first k tokens
    top-p     of these, the fewest that hold a share p of their probability
    min-p     of these, the tokens that are at least m times as likely as the likeliest one

Each cut keeps a beginning of the order, and the likeliest token is always kept. The temperature is
applied before: logits come scaled by it. Tokens are drawn from what is kept, renormalised.

This is the reference: the compiled step (rollout/native/cpu/step/cutting.h) and the kernels
(rollout/native/cuda/cutting.py) find the same sets without sorting.

Suffixes: `_B` rows, `_V` vocabulary, `_K` the largest logits of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Largest logits that are looked at first: sorting all of a large vocabulary takes far longer.
_WIDTH = 2048


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of one request; by default there is none."""

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_off(self) -> bool:
        return self.top_k is None and self.top_p >= 1.0 and self.min_p <= 0.0


def kept_mask(z_BV: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """Return bool [B, V]: the tokens that are kept. `z_BV` are logits over the temperature."""
    vocabulary = z_BV.shape[1]
    width = min(max([_WIDTH, *(cut.top_k or 0 for cut in cuts)]), vocabulary)
    sorted_BK = z_BV.topk(width).values
    num_B = _num_kept(sorted_BK, z_BV, cuts)
    if width < vocabulary and bool((num_B == width).any()):
        sorted_BK = z_BV.sort(dim=1, descending=True).values
        num_B = _num_kept(sorted_BK, z_BV, cuts)
    num_B1 = num_B[:, None]
    least_B1 = sorted_BK.gather(1, num_B1 - 1)
    # Which of several equal logits a sort puts first is not defined, so ties are counted here.
    num_larger_B1 = (sorted_BK > least_B1).sum(1, keepdim=True)
    is_least_BV = z_BV == least_B1
    kept_ties_BV = is_least_BV & (is_least_BV.cumsum(1) <= num_B1 - num_larger_B1)
    return (z_BV > least_B1) | kept_ties_BV


def _num_kept(sorted_BK: Tensor, z_BV: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """Return int64 [B]: how many of the largest logits are kept, at least one.

    Where that is all of them, there may be more.
    """
    (vocabulary, width), device = (z_BV.shape[1], sorted_BK.shape[1]), z_BV.device
    top_k = [[min(cut.top_k or vocabulary, vocabulary)] for cut in cuts]
    top_k_B1 = torch.tensor(top_k, device=device)
    shares = [(cut.top_p, cut.min_p) for cut in cuts]
    top_p_B1, min_p_B1 = torch.tensor(shares, dtype=torch.float64, device=device).split(1, 1)
    top_B1 = sorted_BK[:, :1]
    rank_K = torch.arange(width, device=device)
    weight_BK = (sorted_BK - top_B1).double().exp().masked_fill(rank_K >= top_k_B1, 0.0)
    sum_BK = weight_BK.cumsum(1)
    total_B1 = sum_BK[:, -1:]
    if width < vocabulary:
        # Without top-k, shares are of everything.
        whole_B1 = (z_BV - top_B1).double().exp().sum(1, keepdim=True)
        total_B1 = whole_B1.where(top_k_B1 == vocabulary, total_B1)
    is_in_BK = (sum_BK - weight_BK < top_p_B1 * total_B1) | (top_p_B1 >= 1.0)
    is_in_BK &= (weight_BK >= min_p_B1) & (rank_K < top_k_B1)
    return is_in_BK.sum(1).clamp_(min=1)
