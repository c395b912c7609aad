"""Causal attention in fixed tiles: the kernel of ops/tiled_attention.py, which is its reference.

A program handles one query tile and one key head: `QUERIES` neighbouring positions of a document,
each with the query heads that share the key head, over the keys from 0 in tiles of `KEYS`. Shapes
are constant, and a query is in the same row of its tile however many there are, so its bits are the
same alone and among others. Keys that a query cannot see add exactly 0. The caller of `over_keys`
decides where keys are found: in a list of rows here, in a table of blocks when decoding
(rollout/native/cuda/invariant.py).

Suffixes: `_N` queries, `_S` query tiles, `_R` rows of the key store, `_T` positions in the list of
rows, `_H` heads, `_d` head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.attention import NO_LIMITS, Limits
from homeostat.ops.kernels import aligned, block_of, launches

# tl.dot needs at least this many rows and columns.
_MIN_ROWS = 16


def attend(
    q_NHd: Tensor,
    k_Rd: Tensor,
    v_Rd: Tensor,
    *,
    tiles_5S: Tensor,
    row_T: Tensor,
    num_kv_heads: int,
    head_stride: int,
    queries: int,
    keys: int,
    scale: float,
    limits: Limits = NO_LIMITS,
) -> Tensor:
    """Return [N, H, d].

    Not differentiable. `tiles_5S` is TilePlan.tiles_5S of ops/tiled_attention.py.
    """
    out_NHd = q_NHd.new_empty(q_NHd.shape)
    if launches(out_NHd):
        num_tiles = tiles_5S.shape[1]
        _attend[(num_tiles, num_kv_heads)](
            aligned(q_NHd), aligned(k_Rd), aligned(v_Rd), row_T, tiles_5S, out_NHd,
            num_tiles, head_stride, scale,
            **tile_options(
                q_NHd, num_kv_heads=num_kv_heads, queries=queries, keys=keys, limits=limits
            ),
        )  # fmt: skip
    return out_NHd


def tile_options(
    q_NHd: Tensor, *, num_kv_heads: int, queries: int, keys: int, limits: Limits = NO_LIMITS
) -> dict[str, Any]:
    """Return the compile-time constants of a kernel around `over_keys`.

    Kernels with equal constants give equal bits.
    """
    num_heads, head_dim = q_NHd.shape[1:]
    group, dim = num_heads // num_kv_heads, max(_MIN_ROWS, block_of(head_dim))
    rows = max(_MIN_ROWS, queries * block_of(group))
    is_single = q_NHd.dtype == torch.float32
    return {
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "MEMBERS": block_of(group),
        "QUERIES": queries,
        "ROWS": rows,
        "KEYS": keys,
        "WIDTH": head_dim,
        "DIM": dim,
        "PRECISION": "ieee" if is_single else "tf32",
        # 0 means that there is none.
        "WINDOW": limits.window or 0,
        "SOFT_CAP": limits.soft_cap or 0.0,
        "num_warps": 8 if rows > 64 else 4,
        # Shared memory cannot hold two tiles of wide fp32 heads at a time.
        "num_stages": 1 if is_single and dim > 64 else 2,
    }


@triton.jit(do_not_specialize=["num_tiles", "head_stride"])
def _attend(
    q_ptr, keys_ptr, values_ptr, row_ptr, tiles_ptr, out_ptr, num_tiles, head_stride, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    PRECISION: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    # Tiles with the most keys come last in the plan; start them first, because they take longest.
    tile, head = num_tiles - 1 - tl.program_id(0), tl.program_id(1)
    start = tl.load(tiles_ptr + tile).to(tl.int32)
    first_query = tl.load(tiles_ptr + num_tiles + tile).to(tl.int32)
    length = tl.load(tiles_ptr + 2 * num_tiles + tile).to(tl.int32)
    nth_of_start = tl.load(tiles_ptr + 3 * num_tiles + tile)
    document_ptr = row_ptr + tl.load(tiles_ptr + 4 * num_tiles + tile)

    row, at_d = tl.arange(0, ROWS), tl.arange(0, DIM)
    nth, member = row // MEMBERS, row % MEMBERS
    position = start + nth
    is_query = (nth < QUERIES) & (position >= first_query) & (position < length)
    inside = (is_query & (member < GROUP))[:, None] & (at_d < WIDTH)[None, :]
    at_q = ((nth_of_start + nth) * NUM_HEADS + head * GROUP + member)[:, None] * WIDTH
    q = tl.load(q_ptr + at_q + at_d[None, :], mask=inside, other=0.0)

    last = tl.minimum(start + QUERIES, length)
    out = over_keys(
        q, keys_ptr, values_ptr, document_ptr, position, last, length, head * head_stride, scale,
        BLOCK_TOKENS=1, BLOCK_STRIDE=1, WINDOW=WINDOW, SOFT_CAP=SOFT_CAP,
        ROWS=ROWS, KEYS=KEYS, WIDTH=WIDTH, DIM=DIM, PRECISION=PRECISION,
    )  # fmt: skip
    tl.store(out_ptr + at_q + at_d[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _soft_capped(scores, CAP: tl.constexpr):
    """Return CAP * tanh(scores / CAP), from an exponential that cannot overflow."""
    ratio = scores / CAP
    shrunk = tl.exp(-2.0 * tl.abs(ratio))
    far = (1.0 - shrunk) / (1.0 + shrunk)
    far = tl.where(ratio < 0, -far, far)
    square = ratio * ratio
    # Near 0 the quotient cancels; the series is exact to fp32 there.
    near = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return tl.where(tl.abs(ratio) < 0.25, ratio * near, far) * CAP


@triton.jit
def over_keys(
    q, keys_ptr, values_ptr, table_ptr, position, last, length, offset, scale,
    BLOCK_TOKENS: tl.constexpr, BLOCK_STRIDE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Compute the online softmax of a tile of queries over keys 0 to `last`: fp32 [ROWS, DIM].

    Key t is row `table[t // BLOCK_TOKENS] * BLOCK_STRIDE + t % BLOCK_TOKENS + offset` of the store.
    `WINDOW` and `SOFT_CAP` are those of `Limits`; 0 means none.
    """
    at_d = tl.arange(0, DIM)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, DIM), tl.float32)
    first_seen = 0
    if WINDOW > 0:
        # No -inf: a query whose first tiles are hidden would subtract it from itself.
        highest = tl.full((ROWS,), -1e30, tl.float32)
        first_seen = tl.maximum(tl.min(position, 0) - WINDOW + 1, 0) // KEYS * KEYS
    for first_key in range(first_seen, last, KEYS):
        key = first_key + tl.arange(0, KEYS)
        is_key = key < length
        block = tl.load(table_ptr + key // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int64)
        slot = block * BLOCK_STRIDE + key % BLOCK_TOKENS + offset
        at_k = slot[:, None] * WIDTH + at_d[None, :]
        is_there = is_key[:, None] & (at_d < WIDTH)[None, :]
        k = tl.load(keys_ptr + at_k, mask=is_there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFT_CAP > 0:
            scores = _soft_capped(scores, SOFT_CAP)
        is_seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - top[:, None])
        shrink = tl.exp(highest - top)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(values_ptr + at_k, mask=is_there, other=0.0)
        found = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        summed = summed * shrink[:, None] + found
        highest = top
    return summed / total[:, None]
