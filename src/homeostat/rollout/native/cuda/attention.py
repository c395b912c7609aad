"""Attention of one new token per sequence over its cached blocks: rotation, cache write and softmax
in one kernel.

A program serves one sequence, one key head and one share of the cached keys. The first share also
rotates the new token's key, writes the key and the value to the cache, and adds them to its sums.
If there are several shares, the last program to finish adds up the results of all of them, always
in the order of the shares, so the result does not depend on which program was last. Only keys that
exist are read. Where registers allow it, a program reads its first tile of keys before the previous
kernel has ended.

The softmax is computed with powers of 2: its exponents are scores times log2(e).

From an FP8 cache (cache.py) the kernel reads values times their scales. It also rounds the new key
and value to FP8 before it uses them, so that later steps see the same numbers.

The kernel reads the addresses of the cache from device memory, so that a captured graph stays valid
when the cache moves.

Suffixes: `_B` sequences, `_H` heads, `_K` blocks of a sequence, `_d` head dim, `_F` half of it,
`_X` all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels.e4m3 import scales_of, to_e4m3
from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.shares import LOWEST, softmax_of_shares

_LOG2_E = 1.4426950408889634
# tl.dot wants at least so many rows: a group of query heads is padded to it.
MIN_ROWS = 16
# Sequences that may become longer than this are read in larger tiles if heads are wide.
_MANY_KEYS = 4096
# The most programs that share a sequence, by the keys that it may have: more of them cost 1 us a
# call for a short sequence, and save a third of the time for a long one.
_MAX_SHARES, _MOST_SHARES, _VERY_MANY_KEYS = 16, 32, 16384


@triton.jit
def _turned(at_rows, is_row, norm_ptr, cos, sin, eps, DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Load rows of heads, apply the norm if the model has one, and rotate them.

    Computed in fp32 and rounded wherever the model's modules round.
    """
    element = norm_ptr.dtype.element_ty
    at = tl.arange(0, DIM)
    # Each element rotates together with the one half a head away; the first half has sin negated.
    partner = (at + DIM // 2) % DIM
    x = tl.load(at_rows + at[None, :], mask=is_row[:, None], other=0.0).to(tl.float32)
    other = tl.load(at_rows + partner[None, :], mask=is_row[:, None], other=0.0).to(tl.float32)
    if HAS_NORM:
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + eps)
        weight = tl.load(norm_ptr + at).to(tl.float32)
        other_weight = tl.load(norm_ptr + partner).to(tl.float32)
        x = (x * rstd[:, None] * weight[None, :]).to(element).to(tl.float32)
        other = (other * rstd[:, None] * other_weight[None, :]).to(element).to(tl.float32)
    sin = tl.where(at < DIM // 2, -sin, sin)
    return (x * cos[None, :] + other * sin[None, :]).to(element)


@triton.jit
def _numbers(stored, scales_ptr, slots, is_live, ELEMENT: tl.constexpr, FP8: tl.constexpr):
    """Return cached values as numbers; FP8 values are multiplied by their scales."""
    if FP8:
        scales = tl.load(scales_ptr + slots, mask=is_live, other=0.0)
        stored = (stored.to(tl.float32) * scales[:, None]).to(ELEMENT)
    return stored


@triton.jit
def _quantised(x, ELEMENT: tl.constexpr):
    """Cast rows [rows, DIM], each with its own scale.

    Return the e4m3 values, their scales, and the product of both.
    """
    scales, inverses = scales_of(tl.max(tl.abs(x.to(tl.float32)), 1), False)
    cast = to_e4m3(x.to(tl.float32) * inverses[:, None])
    return cast, scales, (cast.to(tl.float32) * scales[:, None]).to(ELEMENT)


@triton.jit
def _stored(
    x, store_ptr, scales_ptr, slot, DIM: tl.constexpr, ELEMENT: tl.constexpr, FP8: tl.constexpr
):
    """Write the new key or value [1, DIM] to the cache; return it as the cache gives it back."""
    at = store_ptr + slot * DIM + tl.arange(0, DIM)[None, :]
    if FP8:
        cast, scales, x = _quantised(x, ELEMENT)
        tl.store(at, cast)
        tl.store(scales_ptr + slot + tl.zeros((1,), tl.int32), scales)
    else:
        tl.store(at, x)
    return x


@triton.jit
def _cached(
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, head, start, last,
    NUM_KV_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
    ELEMENT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Load a tile of keys and values, starting at key number `start`."""
    at_n = start + tl.arange(0, TILE)
    is_live = at_n < last
    block = tl.load(table_ptr + at_n // BLOCK_TOKENS, mask=is_live, other=0).to(tl.int64)
    slots = (block * NUM_KV_HEADS + head) * BLOCK_TOKENS + at_n % BLOCK_TOKENS
    at = slots[:, None] * DIM + tl.arange(0, DIM)[None, :]
    # Load values first: they arrive while the keys are converted.
    values = tl.load(values_ptr + at, mask=is_live[:, None], other=0.0)
    keys = tl.load(keys_ptr + at, mask=is_live[:, None], other=0.0)
    values = _numbers(values, value_scales_ptr, slots, is_live, ELEMENT, FP8)
    return _numbers(keys, key_scales_ptr, slots, is_live, ELEMENT, FP8), values


@triton.jit
def _more(
    highest, total, summed, q, keys, values, start, last, scale, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the online softmax.

    Return the largest score of each row, the sum of weights of each row and place in a tile, and
    the weighted sum of values of each row.
    """
    is_live = start + tl.arange(0, TILE) < last
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    scores = tl.where(is_live[None, :], scores * scale, float("-inf"))
    top = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    shrink = tl.exp2(highest - top)
    found = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return top, total * shrink[:, None] + weights, summed * shrink[:, None] + found


@triton.jit
def _with_new(highest, total, summed, q, key, value, scale):
    """Add the new token's own key and value to the online softmax."""
    score = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale
    top = tl.maximum(highest, score)
    shrink, weight = tl.exp2(highest - top), tl.exp2(score - top)
    summed = summed * shrink[:, None] + weight[:, None] * value.to(tl.float32)
    return top, total * shrink + weight, summed


@triton.jit
def _softmax_over_keys(
    q, keys, values, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, head, first,
    last, scale, NUM_KV_HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Compute the softmax over cached keys `first` to `last`.

    With AHEAD the first tile was already loaded, and is passed as `keys` and `values`.
    """
    highest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS, TILE), tl.float32)
    summed = tl.zeros((ROWS, DIM), tl.float32)
    if AHEAD:
        highest, total, summed = _more(
            highest, total, summed, q, keys, values, first, last, scale, TILE, PRECISION
        )
        first += TILE
    for start in range(first, last, TILE):
        next_keys, next_values = _cached(
            keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, head, start, last,
            NUM_KV_HEADS, BLOCK_TOKENS, TILE, DIM, q.dtype, FP8,
        )  # fmt: skip
        highest, total, summed = _more(
            highest, total, summed, q, next_keys, next_values, start, last, scale, TILE, PRECISION
        )
    return highest, tl.sum(total, 1), summed


@triton.jit
def _share_of(position, share, SHARES: tl.constexpr, TILE: tl.constexpr):
    """Return the first and last cached key of a share, and the number of shares.

    A short sequence has fewer shares than programs.
    """
    per_share = tl.maximum(tl.cdiv(tl.cdiv(position, SHARES), TILE), 1) * TILE
    first = share * per_share
    last = tl.minimum(first + per_share, position)
    return first, last, tl.maximum(tl.cdiv(position, per_share), 1)


@triton.jit
def _places(stores_ptr, sums_ptr, ELEMENT: tl.constexpr, FP8: tl.constexpr):
    """Return pointers to keys, values and, in FP8, their scales."""
    stored: tl.constexpr = tl.float8e4nv if FP8 else ELEMENT
    keys_ptr = tl.multiple_of(tl.load(stores_ptr).to(tl.pointer_type(stored)), 16)
    values_ptr = tl.multiple_of(tl.load(stores_ptr + 1).to(tl.pointer_type(stored)), 16)
    key_scales_ptr, value_scales_ptr = sums_ptr, sums_ptr
    if FP8:
        key_scales_ptr = tl.load(stores_ptr + 2).to(tl.pointer_type(tl.float32))
        value_scales_ptr = tl.load(stores_ptr + 3).to(tl.pointer_type(tl.float32))
    return keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, stores_ptr, tables_ptr,
    positions_ptr, out_ptr, sums_ptr, tops_ptr, arrived_ptr, q_stride, k_stride, v_stride,
    table_stride, scale, eps,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr, HAS_NORM: tl.constexpr,
    AHEAD: tl.constexpr, PRECISION: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    sequence, head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # Earlier steps have ended by now (`rows.enter`), so what they wrote can be read.
    position = tl.load(positions_ptr + sequence)
    first, last, num_shares = _share_of(position, share, SHARES, TILE)
    if share >= num_shares:
        return
    # The compiler cannot see the alignment of raw addresses; the allocator guarantees it.
    element = q_ptr.dtype.element_ty
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr = _places(
        stores_ptr, sums_ptr, element, FP8
    )
    table_ptr = tables_ptr + sequence * table_stride
    keys, values = keys_ptr, values_ptr
    if AHEAD:
        keys, values = _cached(
            keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, head, first, last,
            NUM_KV_HEADS, BLOCK_TOKENS, TILE, DIM, element, FP8,
        )  # fmt: skip
    block = tl.load(table_ptr + position // BLOCK_TOKENS).to(tl.int64)
    slot = (block * NUM_KV_HEADS + head) * BLOCK_TOKENS + position % BLOCK_TOKENS
    wait_for_last(EARLY)

    rows, one, at_d = tl.arange(0, ROWS), tl.zeros((1,), tl.int32), tl.arange(0, DIM)
    is_row = rows < GROUP
    at_turn = sequence * (DIM // 2) + at_d % (DIM // 2)
    cos, sin = tl.load(cos_ptr + at_turn), tl.load(sin_ptr + at_turn)
    at_q = q_ptr + sequence * q_stride + (head * GROUP + rows[:, None]) * DIM
    at_k = k_ptr + sequence * k_stride + head * DIM + one[:, None]
    value = tl.load(v_ptr + sequence * v_stride + head * DIM + at_d + one[:, None])
    q = _turned(at_q, is_row, q_norm_ptr, cos, sin, eps, DIM, HAS_NORM)
    key = _turned(at_k, one == 0, k_norm_ptr, cos, sin, eps, DIM, HAS_NORM)
    highest, total, summed = _softmax_over_keys(
        q, keys, values, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, head,
        first, last, scale, NUM_KV_HEADS, ROWS, DIM, BLOCK_TOKENS, TILE, AHEAD, PRECISION, FP8,
    )  # fmt: skip
    if share == 0:
        key = _stored(key, keys_ptr, key_scales_ptr, slot, DIM, element, FP8)
        value = _stored(value, values_ptr, value_scales_ptr, slot, DIM, element, FP8)
        highest, total, summed = _with_new(highest, total, summed, q, key, value, scale)
    pair = sequence * NUM_KV_HEADS + head
    if SHARES > 1 and num_shares > 1:
        is_whole, total, summed = softmax_of_shares(
            highest, total, summed, sums_ptr, tops_ptr, arrived_ptr, pair, share, num_shares,
            ROWS, DIM, SHARES,
        )  # fmt: skip
        is_row &= rows < tl.where(is_whole, ROWS, 0)
    at_out = out_ptr + (pair * GROUP + rows[:, None]) * DIM + at_d[None, :]
    tl.store(at_out, (summed / total[:, None]).to(element), mask=is_row[:, None])


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The dimensions of a model that the kernel is compiled for."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_tokens: int
    eps: float

    @property
    def rows(self) -> int:
        return max(MIN_ROWS, triton.next_power_of_2(self.group))


class AttentionScratch:
    """Device memory for the results of the shares, for up to `num_rows` sequences."""

    def __init__(
        self, shape: AttentionShape, *, num_rows: int, shares: int, device: torch.device
    ) -> None:
        pairs = num_rows * shape.num_kv_heads
        self.shares = shares
        size = pairs * shares * shape.rows if shares > 1 else 1
        self.sums = torch.empty(size * shape.head_dim, device=device, dtype=torch.float32)
        self.tops = torch.empty(size * 2, device=device, dtype=torch.float32)
        self.arrived = torch.zeros(pairs, device=device, dtype=torch.int32)


def shares_for(shape: AttentionShape, num_rows: int, *, max_keys: int) -> int:
    """Return how many programs share the keys of a sequence, so that the device is busy."""
    most = _MOST_SHARES if max_keys > _VERY_MANY_KEYS else _MAX_SHARES
    return min(max(_programs(shape) // (num_rows * shape.num_kv_heads), 1), most)


def _programs(shape: AttentionShape) -> int:
    """Return how many programs keep an H200 busy: narrow heads leave room for four of them on a
    multiprocessor, wide ones for two."""
    return 512 if shape.head_dim <= 64 else 256


def _fit(
    shape: AttentionShape, num_programs: int, shares: int, *, max_keys: int, fp8: bool
) -> dict[str, Any]:
    """Return the keys of a tile and the options of a launch, the fastest on an H200.

    If there are few programs, they read larger tiles. Such a program takes up to all registers of a
    multiprocessor. With many programs the next kernel could then not start early, and with wide
    heads it starts later in any case, which only pays for long sequences. The first tile of a share
    is read ahead, into registers; with wide heads only where it is most of what a share reads.
    """
    is_narrow, is_few = shape.head_dim <= 64, 4 * num_programs <= _programs(shape)
    if shares > 1 and is_few and (is_narrow or max_keys > _MANY_KEYS) and not fp8:
        return {"TILE": 128, "AHEAD": True, "num_warps": 8, "num_stages": 2}
    if is_narrow:
        return {"TILE": 64, "AHEAD": True, "num_warps": 4, "num_stages": 2, "maxnreg": 128}
    warps = 8 if shares > 1 else 4
    return {"TILE": 64, "AHEAD": shares > 1, "num_warps": warps, "num_stages": 2}


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
    fp8_cache: bool = False,
) -> Tensor:
    """Return the attention outputs [B, H * d] and append the new keys and values to the cache.

    `stores` holds the addresses of this layer's keys and values as int64 [2]; with an FP8 cache it
    is [4], with the addresses of their scales.
    """
    num_rows = q_BX.shape[0]
    num_programs = num_rows * shape.num_kv_heads * scratch.shares
    max_keys = tables_BK.shape[1] * shape.block_tokens
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
        scale * _LOG2_E,
        shape.eps,
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP=shape.group,
        ROWS=shape.rows,
        DIM=shape.head_dim,
        BLOCK_TOKENS=shape.block_tokens,
        SHARES=scratch.shares,
        HAS_NORM=norms is not None,
        PRECISION="ieee" if q_BX.dtype == torch.float32 else "tf32",
        FP8=fp8_cache,
        **_fit(shape, num_programs, scratch.shares, max_keys=max_keys, fp8=fp8_cache),
        **early(q_BX.device),
    )
    return out_BX
