"""The (token, slot) pairs of a layer, sorted by expert.

A pass with experts computes every pair separately: a token with K experts is K rows. Rows of one
expert lie side by side, in the order of their tokens, so that one product can serve them all.

Suffixes: `_N` tokens, `_K` slots, `_S` pairs, `_E` experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from homeostat.ops import kernels


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pair n * K + k is token n's slot k. All are int32.

    `order_S` is the pair at each place, `place_S` the place of each pair, and the rows of an expert
    end before `ends_E`.
    """

    order_S: Tensor
    place_S: Tensor
    ends_E: Tensor


def pairs_of(ids_NK: Tensor, num_experts: int, *, like: Tensor) -> Pairs:
    """Sort the pairs; nothing waits for the device. `like`: a tensor of the pass."""
    ids_S = ids_NK.flatten()
    if kernels.fused(like):
        from homeostat.ops.kernels.pairs import sorted_pairs

        return Pairs(*sorted_pairs(ids_S, num_experts))
    order_S = ids_S.argsort(stable=True)
    # Not bincount, which waits for the device to learn the size of its result.
    counts_E = ids_S.new_zeros(num_experts).scatter_add_(0, ids_S, torch.ones_like(ids_S))
    return Pairs(order_S.int(), order_S.argsort().int(), counts_E.cumsum(0).int())
