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
def _turned(
    at_rows,
    is_row,
    norm_ptr,
    cos,
    sin,
    eps,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Rows of heads, normed where the model does so and rotated, in two halves. In fp32, rounded
    where the modules round."""
    element = norm_ptr.dtype.element_ty
    at = tl.arange(0, HALF)
    left = tl.load(at_rows + at[None, :], mask=is_row[:, None], other=0.0).to(tl.float32)
    right = tl.load(at_rows + HALF + at[None, :], mask=is_row[:, None], other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        rstd = 1.0 / tl.sqrt(squares / (2 * HALF) + eps)
        weight_left = tl.load(norm_ptr + at).to(tl.float32)
        weight_right = tl.load(norm_ptr + HALF + at).to(tl.float32)
        left = (left * rstd[:, None] * weight_left[None, :]).to(element).to(tl.float32)
        right = (right * rstd[:, None] * weight_right[None, :]).to(element).to(tl.float32)
    turned_left = left * cos[None, :] - right * sin[None, :]
    turned_right = right * cos[None, :] + left * sin[None, :]
    return turned_left.to(element), turned_right.to(element)


@triton.jit
def _write(
    at_k, at_v, key_ptr, value_ptr, norm_ptr, cos, sin, eps, HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """The new token's key, rotated, and its value go to the cache."""
    one = tl.zeros((1,), tl.int32)
    left, right = _turned(at_k + one[:, None], one == 0, norm_ptr, cos, sin, eps, HALF, HAS_NORM)
    tl.store(key_ptr + tl.arange(0, HALF)[None, :], left)
    tl.store(key_ptr + HALF + tl.arange(0, HALF)[None, :], right)
    at_d = tl.arange(0, 2 * HALF)
    tl.store(value_ptr + at_d, tl.load(at_v + at_d))


@triton.jit
def _softmax_over_keys(
    q_left,
    q_right,
    keys_ptr,
    values_ptr,
    table_ptr,
    head,
    first,
    last,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over keys `first` to `last`: the largest score, the sum of weights, and the
    weighted sum of values, per row."""
    at_d = tl.arange(0, 2 * HALF)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, 2 * HALF), tl.float32)
    for start in range(first, last, TILE):
        at_n = start + tl.arange(0, TILE)
        is_live = at_n < last
        block = tl.load(table_ptr + at_n // BLOCK_TOKENS, mask=is_live, other=0).to(tl.int64)
        slot = (block * NUM_KV_HEADS + head) * BLOCK_TOKENS + at_n % BLOCK_TOKENS
        at_k = keys_ptr + slot[:, None] * 2 * HALF + tl.arange(0, HALF)[None, :]
        k_left = tl.load(at_k, mask=is_live[:, None], other=0.0)
        k_right = tl.load(at_k + HALF, mask=is_live[:, None], other=0.0)
        scores = tl.dot(q_left, tl.trans(k_left), input_precision=PRECISION)
        scores += tl.dot(q_right, tl.trans(k_right), input_precision=PRECISION)
        scores = tl.where(is_live[None, :], scores * scale, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - top[:, None])
        shrink = tl.exp(highest - top)
        total = total * shrink + tl.sum(weights, 1)
        at_v = values_ptr + slot[:, None] * 2 * HALF + at_d[None, :]
        values = tl.load(at_v, mask=is_live[:, None], other=0.0)
        found = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        summed = summed * shrink[:, None] + found
        highest = top
    return highest, total, summed


@triton.jit
def _is_last(arrived_ptr, num_shares):
    """Whether all shares have stored what they found. The last one leaves the count as it was."""
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived_ptr, 1) == num_shares - 1
    if is_last:
        tl.store(arrived_ptr, 0)
    return is_last


@triton.jit
def _sum_of_shares(sums_ptr, tops_ptr, first, num_shares, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """What all shares found, in their order. They were written by other programs: read past L1."""
    rows, at_d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, WIDTH), tl.float32)
    for share in range(num_shares):
        at = (first + share) * ROWS + rows
        its_top = tl.load(tops_ptr + at * 2, cache_modifier=".cg")
        its_total = tl.load(tops_ptr + at * 2 + 1, cache_modifier=".cg")
        its_sum = tl.load(sums_ptr + at[:, None] * WIDTH + at_d[None, :], cache_modifier=".cg")
        top = tl.maximum(highest, its_top)
        shrink, its_shrink = tl.exp(highest - top), tl.exp(its_top - top)
        total = total * shrink + its_total * its_shrink
        summed = summed * shrink[:, None] + its_sum * its_shrink[:, None]
        highest = top
    return summed / total[:, None]


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, stores_ptr, tables_ptr,
    positions_ptr, out_ptr, sums_ptr, tops_ptr, arrived_ptr, q_stride, k_stride, v_stride,
    table_stride, scale, eps,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr, HAS_NORM: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    sequence, head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions_ptr + sequence)
    length = position + 1
    per_share = tl.cdiv(tl.cdiv(length, SHARES), TILE) * TILE
    # A short sequence has fewer shares than there are programs for it.
    num_shares = tl.cdiv(length, per_share)
    first = share * per_share
    if first >= length:
        return
    last = tl.minimum(first + per_share, length)

    rows, at_d = tl.arange(0, ROWS), tl.arange(0, 2 * HALF)
    is_row = rows < GROUP
    cos = tl.load(cos_ptr + sequence * HALF + tl.arange(0, HALF))
    sin = tl.load(sin_ptr + sequence * HALF + tl.arange(0, HALF))
    # Addresses make no promise of alignment; the allocator does.
    element = q_ptr.dtype.element_ty
    keys_ptr = tl.multiple_of(tl.load(stores_ptr).to(tl.pointer_type(element)), 16)
    values_ptr = tl.multiple_of(tl.load(stores_ptr + 1).to(tl.pointer_type(element)), 16)
    table_ptr = tables_ptr + sequence * table_stride

    if last == length:
        at_k = k_ptr + sequence * k_stride + head * 2 * HALF
        at_v = v_ptr + sequence * v_stride + head * 2 * HALF
        block = tl.load(table_ptr + position // BLOCK_TOKENS).to(tl.int64)
        slot = (block * NUM_KV_HEADS + head) * BLOCK_TOKENS + position % BLOCK_TOKENS
        _write(
            at_k, at_v, keys_ptr + slot * 2 * HALF, values_ptr + slot * 2 * HALF,
            k_norm_ptr, cos, sin, eps, HALF, HAS_NORM,
        )  # fmt: skip
    tl.debug_barrier()

    at_q = q_ptr + sequence * q_stride + (head * GROUP + rows[:, None]) * 2 * HALF
    q_left, q_right = _turned(at_q, is_row, q_norm_ptr, cos, sin, eps, HALF, HAS_NORM)
    highest, total, summed = _softmax_over_keys(
        q_left, q_right, keys_ptr, values_ptr, table_ptr, head, first, last, scale,
        NUM_KV_HEADS, ROWS, HALF, BLOCK_TOKENS, TILE, PRECISION,
    )  # fmt: skip
    pair = sequence * NUM_KV_HEADS + head
    at_out = out_ptr + (pair * GROUP + rows[:, None]) * 2 * HALF + at_d[None, :]
    if SHARES == 1 or num_shares == 1:
        tl.store(at_out, (summed / total[:, None]).to(element), mask=is_row[:, None])
    else:
        at = (pair * SHARES + share) * ROWS + rows
        tl.store(sums_ptr + at[:, None] * 2 * HALF + at_d[None, :], summed)
        tl.store(tops_ptr + at * 2, highest)
        tl.store(tops_ptr + at * 2 + 1, total)
        if _is_last(arrived_ptr + pair, num_shares):
            whole = _sum_of_shares(sums_ptr, tops_ptr, pair * SHARES, num_shares, ROWS, 2 * HALF)
            tl.store(at_out, whole.to(element), mask=is_row[:, None])


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
        self.sums = torch.empty(size * shape.head_dim, device=device, dtype=torch.float32)
        self.tops = torch.empty(size * 2, device=device, dtype=torch.float32)
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
        scratch.sums,
        scratch.tops,
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
