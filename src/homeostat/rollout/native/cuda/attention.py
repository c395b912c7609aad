"""Attention of one new token per sequence over its cached blocks: rotation, cache write and softmax
in one kernel.

A program serves one sequence, one key head and one share of the keys. The share that holds the new
token's own position rotates its key and writes key and value to the cache before it reads them.
With several shares the last program to finish sums up what all of them found, in their order: the
result does not depend on who that was. Only live keys are read.

The cache is known by addresses kept on the device, so that a captured graph outlives it.

Suffixes: `_B` sequences, `_H` heads, `_K` blocks of a sequence, `_d` head dim, `_F` half of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last

# tl.dot wants at least so many rows: a group of query heads is padded to it.
MIN_ROWS = 16


@triton.jit
def _normed_half(
    left, right, weight_ptr, offsets_F, eps, HALF: tl.constexpr, HAS_NORM: tl.constexpr
):
    """RMS norm of rows that come in two halves; both in fp32, rounded once as the module does."""
    if HAS_NORM:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        rstd = 1.0 / tl.sqrt(squares / (2 * HALF) + eps)
        weight_left = tl.load(weight_ptr + offsets_F).to(tl.float32)
        weight_right = tl.load(weight_ptr + HALF + offsets_F).to(tl.float32)
        element = weight_ptr.dtype.element_ty
        left = (left * rstd[:, None] * weight_left[None, :]).to(element).to(tl.float32)
        right = (right * rstd[:, None] * weight_right[None, :]).to(element).to(tl.float32)
    return left, right


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    stores_ptr,
    tables_ptr,
    positions_ptr,
    out_ptr,
    partial_ptr,
    total_ptr,
    arrived_ptr,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    scale,
    eps,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SHARES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_last(EARLY)
    sequence, head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    element = q_ptr.dtype.element_ty
    position = tl.load(positions_ptr + sequence)
    length = position + 1
    per_share = tl.cdiv(tl.cdiv(length, SHARES), TILE) * TILE
    first = share * per_share
    last = tl.minimum(first + per_share, length)
    # A short sequence has fewer shares than there are programs for it.
    num_shares = tl.cdiv(length, per_share)
    if first >= length:
        return

    rows = tl.arange(0, ROWS)
    offsets_F = tl.arange(0, HALF)
    offsets_d = tl.arange(0, 2 * HALF)
    is_row = rows < GROUP
    cos = tl.load(cos_ptr + sequence * HALF + offsets_F)
    sin = tl.load(sin_ptr + sequence * HALF + offsets_F)
    # Addresses carry no promise of alignment; the allocator gives one.
    keys_ptr = tl.load(stores_ptr).to(tl.pointer_type(element))
    values_ptr = tl.load(stores_ptr + 1).to(tl.pointer_type(element))
    keys_ptr = tl.multiple_of(keys_ptr, 16)
    values_ptr = tl.multiple_of(values_ptr, 16)
    table_ptr = tables_ptr + sequence * table_stride

    if (first <= position) & (position < last):
        at_k = k_ptr + sequence * k_stride + head * 2 * HALF
        k_left = tl.load(at_k + offsets_F).to(tl.float32)[None, :]
        k_right = tl.load(at_k + HALF + offsets_F).to(tl.float32)[None, :]
        k_left, k_right = _normed_half(k_left, k_right, k_norm_ptr, offsets_F, eps, HALF, HAS_NORM)
        block = tl.load(table_ptr + position // BLOCK_TOKENS).to(tl.int64)
        slot = (block * NUM_KV_HEADS + head) * BLOCK_TOKENS + position % BLOCK_TOKENS
        at = keys_ptr + slot * 2 * HALF
        both = offsets_F[None, :]
        tl.store(at + both, (k_left * cos - k_right * sin).to(element))
        tl.store(at + HALF + both, (k_right * cos + k_left * sin).to(element))
        value = tl.load(v_ptr + sequence * v_stride + head * 2 * HALF + offsets_d)
        tl.store(values_ptr + slot * 2 * HALF + offsets_d, value)
    tl.debug_barrier()

    at_q = q_ptr + sequence * q_stride + (head * GROUP + rows[:, None]) * 2 * HALF
    q_left = tl.load(at_q + offsets_F[None, :], mask=is_row[:, None], other=0.0).to(tl.float32)
    q_right = tl.load(at_q + HALF + offsets_F[None, :], mask=is_row[:, None], other=0.0)
    q_right = q_right.to(tl.float32)
    q_left, q_right = _normed_half(q_left, q_right, q_norm_ptr, offsets_F, eps, HALF, HAS_NORM)
    turned_left = (q_left * cos[None, :] - q_right * sin[None, :]).to(element)
    turned_right = (q_right * cos[None, :] + q_left * sin[None, :]).to(element)

    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, 2 * HALF), tl.float32)
    tile = tl.arange(0, TILE)
    for start in range(first, last, TILE):
        at_n = start + tile
        is_live = at_n < last
        block = tl.load(table_ptr + at_n // BLOCK_TOKENS, mask=is_live, other=0).to(tl.int64)
        slot = (block * NUM_KV_HEADS + head) * BLOCK_TOKENS + at_n % BLOCK_TOKENS
        at_k = keys_ptr + slot[:, None] * 2 * HALF + offsets_F[None, :]
        k_left = tl.load(at_k, mask=is_live[:, None], other=0.0)
        k_right = tl.load(at_k + HALF, mask=is_live[:, None], other=0.0)
        scores = tl.dot(turned_left, tl.trans(k_left), input_precision=PRECISION)
        scores += tl.dot(turned_right, tl.trans(k_right), input_precision=PRECISION)
        scores = tl.where(is_live[None, :], scores * scale, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - top[:, None])
        shrink = tl.exp(highest - top)
        total = total * shrink + tl.sum(weights, 1)
        at_v = values_ptr + slot[:, None] * 2 * HALF + offsets_d[None, :]
        values = tl.load(at_v, mask=is_live[:, None], other=0.0)
        found = tl.dot(weights.to(element), values, input_precision=PRECISION)
        summed = summed * shrink[:, None] + found
        highest = top

    at_out = out_ptr + (sequence * NUM_KV_HEADS + head) * GROUP * 2 * HALF
    at_out = at_out + rows[:, None] * 2 * HALF + offsets_d[None, :]
    whole = (summed / total[:, None]).to(element)
    if SHARES == 1 or num_shares == 1:
        tl.store(at_out, whole, mask=is_row[:, None])
    else:
        pair = sequence * NUM_KV_HEADS + head
        number = (pair * SHARES + share) * ROWS
        tl.store(partial_ptr + (number + rows[:, None]) * 2 * HALF + offsets_d[None, :], summed)
        tl.store(total_ptr + (number + rows) * 2, highest)
        tl.store(total_ptr + (number + rows) * 2 + 1, total)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + pair, 1) == num_shares - 1:
            highest = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            summed = tl.zeros((ROWS, 2 * HALF), tl.float32)
            for other in range(num_shares):
                number = (pair * SHARES + other) * ROWS
                its_top = tl.load(total_ptr + (number + rows) * 2, cache_modifier=".cg")
                its_total = tl.load(total_ptr + (number + rows) * 2 + 1, cache_modifier=".cg")
                its_sum = tl.load(
                    partial_ptr + (number + rows[:, None]) * 2 * HALF + offsets_d[None, :],
                    cache_modifier=".cg",
                )
                top = tl.maximum(highest, its_top)
                shrink, its_shrink = tl.exp(highest - top), tl.exp(its_top - top)
                total = total * shrink + its_total * its_shrink
                summed = summed * shrink[:, None] + its_sum * its_shrink[:, None]
                highest = top
            tl.store(at_out, (summed / total[:, None]).to(element), mask=is_row[:, None])
            tl.store(arrived_ptr + pair, 0)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What of a model the kernel is compiled for."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_tokens: int
    eps: float

    @property
    def rows(self) -> int:
        return max(MIN_ROWS, triton.next_power_of_2(self.group))


class AttentionScratch:
    """Room for what shares of the keys found, for up to `num_rows` sequences."""

    def __init__(
        self, shape: AttentionShape, *, num_rows: int, shares: int, device: torch.device
    ) -> None:
        pairs = num_rows * shape.num_kv_heads
        self.shares = shares
        size = pairs * shares * shape.rows if shares > 1 else 1
        self.partial = torch.empty(size * shape.head_dim, device=device, dtype=torch.float32)
        self.total = torch.empty(size * 2, device=device, dtype=torch.float32)
        self.arrived = torch.zeros(pairs, device=device, dtype=torch.int32)


def decode_attention(
    q_BX: Tensor,
    k_BX: Tensor,
    v_BX: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None,
    cos_BF: Tensor,
    sin_BF: Tensor,
    stores: Tensor,
    tables_BK: Tensor,
    positions_B: Tensor,
    shape: AttentionShape,
    scratch: AttentionScratch,
    scale: float,
) -> Tensor:
    """[B, H * d]. `stores`: int64 [2], the addresses of this layer's keys and values."""
    num_rows = q_BX.shape[0]
    out_BX = torch.empty_like(q_BX, memory_format=torch.contiguous_format)
    q_norm, k_norm = norms if norms is not None else (q_BX, q_BX)
    _attend[(num_rows, shape.num_kv_heads, scratch.shares)](
        q_BX,
        k_BX,
        v_BX,
        q_norm,
        k_norm,
        cos_BF,
        sin_BF,
        stores,
        tables_BK,
        positions_B,
        out_BX,
        scratch.partial,
        scratch.total,
        scratch.arrived,
        q_BX.stride(0),
        k_BX.stride(0),
        v_BX.stride(0),
        tables_BK.stride(0),
        scale,
        shape.eps,
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP=shape.group,
        ROWS=shape.rows,
        HALF=shape.head_dim // 2,
        BLOCK_TOKENS=shape.block_tokens,
        TILE=128 if scratch.shares == 1 else 64,
        SHARES=scratch.shares,
        HAS_NORM=norms is not None,
        PRECISION="ieee" if q_BX.dtype == torch.float32 else "tf32",
        num_warps=4 if scratch.shares == 1 else 2,
        **early(q_BX.device),
    )
    return out_BX
