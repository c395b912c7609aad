"""The choice of a token's experts and their weights, in one pass over the scores each.

Everything is fp32, and a row is computed by itself, in one order: see ops/routing.py, whose plain
code is the reference.

Suffixes: `_N` tokens, `_E` experts, `_K` slots, best first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from homeostat.ops.kernels import block_of, launches
from homeostat.ops.moe_shape import MoeShape

# Scores of a tile.
_TILE = 2048


def best_experts(scores_NE: Tensor, bias_E: Tensor | None, shape: MoeShape) -> Tensor:
    """Return int64 [N, K]: the best experts of each token, best first, ties by number."""
    scores_NE = scores_NE.contiguous()
    num_rows, num_experts = scores_NE.shape
    ids_NK = scores_NE.new_empty((num_rows, shape.top_k), dtype=torch.int64)
    if launches(ids_NK):
        rows, experts = _tile(num_experts)
        _best[(triton.cdiv(num_rows, rows),)](
            scores_NE, scores_NE if bias_E is None else bias_E, ids_NK, num_rows,
            NUM_EXPERTS=num_experts, HAS_BIAS=bias_E is not None, GROUPS=shape.num_groups,
            GROUPS_KEPT=shape.num_groups_kept, SLOTS=shape.top_k, ROWS=rows, EXPERTS=experts,
        )  # fmt: skip
    return ids_NK


class ExpertWeights(torch.autograd.Function):
    """The weights of the chosen experts as an autograd function."""

    @staticmethod
    def forward(ctx: Any, scores_NE: Tensor, ids_NK: Tensor, shape: MoeShape) -> Tensor:
        scores_NE, ids_NK = scores_NE.contiguous(), ids_NK.contiguous()
        ctx.save_for_backward(scores_NE, ids_NK)
        ctx.shape = shape
        weights_NK = scores_NE.new_empty(ids_NK.shape)
        _launch(_weights, scores_NE, ids_NK, weights_NK, weights_NK, shape)
        return weights_NK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        scores_NE, ids_NK = ctx.saved_tensors
        dscores_NE = torch.empty_like(scores_NE)
        _launch(_weights_backward, scores_NE, ids_NK, grads[0].contiguous(), dscores_NE, ctx.shape)
        return dscores_NE, None, None


def _launch(
    kernel: Any, scores_NE: Tensor, ids_NK: Tensor, first: Tensor, second: Tensor, shape: MoeShape
) -> None:
    if launches(ids_NK):
        num_rows, num_experts = scores_NE.shape
        rows, experts = _tile(num_experts)
        # The families differ here: a sum of sigmoids can be 0, one of softmax values cannot.
        least = 1e-20 if shape.scoring == "sigmoid" else 0.0
        kernel[(triton.cdiv(num_rows, rows),)](
            scores_NE, ids_NK, first, second, num_rows, shape.scaling, least,
            NUM_EXPERTS=num_experts, IS_NORMALISED=shape.normalised, SLOTS=shape.top_k, ROWS=rows,
            EXPERTS=experts,
        )  # fmt: skip


def _tile(num_experts: int) -> tuple[int, int]:
    experts = block_of(num_experts)
    return max(1, _TILE // experts), experts


@triton.jit
def best_of(wanted):
    """Return the place of the largest entry of each row; of equal ones, the first."""
    _, place = tl.max(wanted, 1, return_indices=True, return_indices_tie_break_left=True)
    return place


@triton.jit
def in_best_groups(
    wanted, expert, NUM_EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_KEPT: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Rule out all experts but those of the best groups. A group's score: its two best experts."""
    size: tl.constexpr = NUM_EXPERTS // GROUPS
    low = float("-inf")
    # Each expert's entry holds the score of its group.
    scores = tl.full((ROWS, EXPERTS), low, tl.float32)
    for group in tl.static_range(GROUPS):
        is_in = (expert // size == group)[None, :]
        own = tl.where(is_in, wanted, low)
        score = tl.max(own, 1)
        if size > 1:
            first = best_of(own)
            score += tl.max(tl.where(expert[None, :] == first[:, None], low, own), 1)
        scores = tl.where(is_in, score[:, None], scores)
    kept = tl.full((ROWS, EXPERTS), low, tl.float32)
    for _ in tl.static_range(GROUPS_KEPT):
        chosen = best_of(scores) // size
        is_in = (expert // size)[None, :] == chosen[:, None]
        kept = tl.where(is_in, wanted, kept)
        scores = tl.where(is_in, low, scores)
    return kept


@triton.jit(do_not_specialize=["num_rows"])
def _best(
    scores_ptr, bias_ptr, ids_ptr, num_rows,
    NUM_EXPERTS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    is_row, is_expert = row < num_rows, expert < NUM_EXPERTS
    at = row[:, None] * NUM_EXPERTS + expert[None, :]
    inside = is_row[:, None] & is_expert[None, :]
    wanted = tl.load(scores_ptr + at, mask=inside, other=float("-inf"))
    if HAS_BIAS:
        wanted += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)[None, :]
    # Scores that are no numbers choose the first experts: a number that there is in any case.
    wanted = tl.where(wanted == wanted, wanted, float("inf"))
    if GROUPS > 1:
        wanted = in_best_groups(wanted, expert, NUM_EXPERTS, GROUPS, GROUPS_KEPT, ROWS, EXPERTS)
    for slot in tl.static_range(SLOTS):
        chosen = best_of(wanted)
        tl.store(ids_ptr + row * SLOTS + slot, chosen.to(tl.int64), mask=is_row)
        wanted = tl.where(expert[None, :] == chosen[:, None], float("-inf"), wanted)


@triton.jit
def _total(scores_ptr, ids_ptr, row, is_row, least, NUM_EXPERTS: tl.constexpr, SLOTS: tl.constexpr):
    """Return the sum of the chosen experts' scores, in slot order."""
    total = tl.load(ids_ptr + row * SLOTS, mask=is_row, other=0)
    total = tl.load(scores_ptr + row * NUM_EXPERTS + total, mask=is_row, other=1.0)
    for slot in tl.static_range(1, SLOTS):
        chosen = tl.load(ids_ptr + row * SLOTS + slot, mask=is_row, other=0)
        total += tl.load(scores_ptr + row * NUM_EXPERTS + chosen, mask=is_row, other=0.0)
    return total + least


@triton.jit(do_not_specialize=["num_rows"])
def _weights(
    scores_ptr, ids_ptr, weights_ptr, _, num_rows, scaling, least,
    NUM_EXPERTS: tl.constexpr, IS_NORMALISED: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    total = tl.full((ROWS,), 1.0, tl.float32)
    if IS_NORMALISED:
        total = _total(scores_ptr, ids_ptr, row, is_row, least, NUM_EXPERTS, SLOTS)
    for slot in tl.static_range(SLOTS):
        chosen = tl.load(ids_ptr + row * SLOTS + slot, mask=is_row, other=0)
        score = tl.load(scores_ptr + row * NUM_EXPERTS + chosen, mask=is_row, other=0.0)
        tl.store(weights_ptr + row * SLOTS + slot, tl.div_rn(score, total) * scaling, mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])
def _weights_backward(
    scores_ptr, ids_ptr, grad_ptr, dscores_ptr, num_rows, scaling, least,
    NUM_EXPERTS: tl.constexpr, IS_NORMALISED: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    is_row = row < num_rows
    total = tl.full((ROWS,), 1.0, tl.float32)
    mean = tl.zeros((ROWS,), dtype=tl.float32)
    if IS_NORMALISED:
        # With s_k / total for weights: ds_k = (g_k - sum of g_j s_j / total) / total.
        total = _total(scores_ptr, ids_ptr, row, is_row, least, NUM_EXPERTS, SLOTS)
        for slot in tl.static_range(SLOTS):
            chosen = tl.load(ids_ptr + row * SLOTS + slot, mask=is_row, other=0)
            score = tl.load(scores_ptr + row * NUM_EXPERTS + chosen, mask=is_row, other=0.0)
            grad = tl.load(grad_ptr + row * SLOTS + slot, mask=is_row, other=0.0)
            mean += grad * score / total
    dscores = tl.zeros((ROWS, EXPERTS), dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        chosen = tl.load(ids_ptr + row * SLOTS + slot, mask=is_row, other=0)
        grad = tl.load(grad_ptr + row * SLOTS + slot, mask=is_row, other=0.0)
        own = ((grad - mean) / total * scaling)[:, None]
        dscores = tl.where(expert[None, :] == chosen[:, None], own, dscores)
    at = row[:, None] * NUM_EXPERTS + expert[None, :]
    inside = is_row[:, None] & (expert < NUM_EXPERTS)[None, :]
    tl.store(dscores_ptr + at, dscores, mask=inside)
