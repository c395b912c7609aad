"""The load of experts: how many tokens each has, losses that keep it even, and room for tokens.

    aux            E * sum_e f_e * P_e over all tokens of an update (Fedus et al. 2021)
    sequence_aux   the same within each row, averaged over rows (DeepSeek-V3)
    z              mean over tokens of logsumexp(logits)^2 (Zoph et al. 2022)

`f_e` is the share of all choices that expert e has (they sum to 1), and `P_e` its mean probability,
the only one of the two that has a gradient. An even load has the value 1, whatever the number of
experts and slots. Sigmoid scores are divided by their sum first.

The integers `weight_N` say how often each token of the pass occurs in the batch (0 if it does not
count), so the sums over the parts of an update are the sums over the update.

Suffixes: `_N` tokens of a pass, `_E` experts, `_K` slots of a token, `_C` counted tokens: the place
of each in the pass, `_B` rows, `_S` all (token, slot) pairs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from homeostat.ops.moe_shape import MoeShape


def token_load(ids_NK: Tensor, weight_N: Tensor, *, num_experts: int) -> Tensor:
    """Return int64 [E]: how many of the counted tokens go to each expert."""
    load_E = torch.zeros(num_experts, dtype=torch.int64, device=ids_NK.device)
    # Integers, because sums of floats would depend on the order of a GPU's threads.
    return load_E.index_add_(0, ids_NK.flatten(), weight_N.repeat_interleave(ids_NK.shape[1]))


def probabilities(scores_NE: Tensor, shape: MoeShape) -> Tensor:
    """Return fp32 [N, E]: scores that sum to 1 for each token."""
    if shape.scoring == "softmax":
        return scores_NE
    return scores_NE / (scores_NE.sum(dim=1, keepdim=True) + 1e-20)


def aux_sum(probs_NE: Tensor, weight_N: Tensor, share_E: Tensor) -> Tensor:
    """Return the sum over counted tokens of E * sum_e f_e * p_e. `share_E` is f of the update."""
    return (weight_N.to(probs_NE.dtype) @ probs_NE) @ share_E * len(share_E)


def sequence_aux_sum(
    probs_NE: Tensor, ids_NK: Tensor, place_C: Tensor, row_C: Tensor, *, num_rows: int
) -> Tensor:
    """Return the sum over rows of E * sum_e f_e * P_e, both taken within the row."""
    num_experts, num_slots = probs_NE.shape[1], ids_NK.shape[1]
    zeros_BE = probs_NE.new_zeros(num_rows, num_experts)
    probs_BE = zeros_BE.index_add(0, row_C, probs_NE[place_C])
    pairs_S = row_C.repeat_interleave(num_slots) * num_experts + ids_NK[place_C].flatten()
    ones_S = torch.ones_like(pairs_S)
    load_BE = torch.zeros_like(zeros_BE, dtype=torch.int64)
    load_BE.view(-1).index_add_(0, pairs_S, ones_S)
    # A row without counted tokens adds 0; the bound only avoids 0 / 0.
    tokens_B1 = load_BE.sum(dim=1, keepdim=True).clamp_min(1).to(probs_NE.dtype) / num_slots
    shares_BE = load_BE.to(probs_NE.dtype) / (tokens_B1 * num_slots)
    return (shares_BE * probs_BE / tokens_B1).sum() * num_experts


def z_sum(logits_NE: Tensor, weight_N: Tensor) -> Tensor:
    """Return the sum over counted tokens of logsumexp(logits)^2."""
    return weight_N.to(logits_NE.dtype) @ logits_NE.logsumexp(dim=1).square()


def capacity_of(factor: float, *, num_tokens: int, shape: MoeShape) -> int:
    """Return how many tokens of a micro-batch an expert takes."""
    return math.ceil(factor * num_tokens * shape.top_k / shape.num_experts)


def has_room(ids_NK: Tensor, number_N: Tensor, *, capacity: int, num_experts: int) -> Tensor:
    """Return bool [N, K]: True for the first `capacity` tokens of each expert, by `number_N`."""
    ids_S = ids_NK.flatten()
    numbers_S = number_N.repeat_interleave(ids_NK.shape[1])
    order_S = (ids_S * len(number_N) + numbers_S).argsort()
    sorted_S = ids_S[order_S]
    starts_E = torch.searchsorted(sorted_S, torch.arange(num_experts, device=ids_S.device))
    rank_S = torch.arange(len(ids_S), device=ids_S.device) - starts_E[sorted_S]
    kept_S = torch.empty_like(rank_S, dtype=torch.bool)
    kept_S[order_S] = rank_S < capacity
    return kept_S.view_as(ids_NK)


def with_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return x, whose backward pass also computes the gradient of `loss`, with weight 1.

    The loss of a layer need not travel through the layers behind it, and a layer that is
    recomputed for its gradient makes its loss again.
    """
    return _WithLoss.apply(x, loss)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones(())
