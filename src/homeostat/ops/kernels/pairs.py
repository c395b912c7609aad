"""Sort (token, slot) pairs by expert, without the host, and cut the result into tiles.

    ids -> how many pairs of a chunk go to each expert -> sum over experts and chunks -> places

Pairs of an expert stay in the order of their tokens. A tile holds rows of one expert alone; how
many tiles there are is known on the device only, so programs beyond the last one end at once.

Suffixes: `_S` pairs, `_E` experts, `_C` chunks of pairs, `_T` tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import block_of, launches

# Comparisons of a program: pairs of a chunk with experts.
_COMPARED = 2**15
_MAX_CHUNK = 128
_TILES = 32


def sorted_pairs(ids_S: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return int32 [S], [S], [E]: the pair at each place, the place of each pair, and the ends."""
    size = len(ids_S)
    experts = block_of(num_experts)
    chunk = max(16, min(_MAX_CHUNK, _COMPARED // experts))
    num_chunks = triton.cdiv(size, chunk)
    counts_EC = ids_S.new_empty((num_experts, num_chunks), dtype=torch.int32)
    order_S = torch.empty_like(ids_S, dtype=torch.int32)
    place_S = torch.empty_like(order_S)
    # Without pairs nothing is launched, and all experts end where they begin.
    ends_E = order_S.new_empty(num_experts) if size else order_S.new_zeros(num_experts)
    grid, warps = (num_chunks,), 8
    if launches(ids_S):
        _count[grid](
            ids_S, counts_EC, size, num_experts, EXPERTS=experts, CHUNK=chunk, num_warps=warps
        )
    ends_EC = counts_EC.flatten().cumsum(0, dtype=torch.int32).view_as(counts_EC)
    if launches(ids_S):
        _place[grid](
            ids_S, counts_EC, ends_EC, order_S, place_S, ends_E, size, num_experts,
            EXPERTS=experts, CHUNK=chunk, num_warps=warps,
        )  # fmt: skip
    return order_S, place_S, ends_E


def max_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Return how many tiles there can be at most: every expert may leave its last one unfilled."""
    hit = min(num_pairs, num_experts)
    return hit + (num_pairs - hit) // rows


def tiles_of(ends_E: Tensor, num_pairs: int, *, rows: int) -> Tensor:
    """Return int32 [3, T]: expert (-1: none), first row and end of the expert's rows by tile."""
    num_experts = len(ends_E)
    num_tiles = max_tiles(num_pairs, num_experts, rows)
    tiles_3T = ends_E.new_empty((3, num_tiles))
    if launches(tiles_3T):
        _cut[(triton.cdiv(num_tiles, _TILES),)](
            ends_E, tiles_3T, num_experts, num_tiles,
            ROWS=rows, EXPERTS=block_of(num_experts), TILES=_TILES,
        )  # fmt: skip
    return tiles_3T


@triton.jit
def _count(
    ids_ptr, counts_ptr, size, num_experts, EXPERTS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.arange(0, EXPERTS)
    ids = tl.load(ids_ptr + at, mask=at < size, other=-1).to(tl.int32)
    counts = tl.sum((ids[:, None] == expert[None, :]).to(tl.int32), 0)
    at_count = expert * tl.num_programs(0) + tl.program_id(0)
    tl.store(counts_ptr + at_count, counts, mask=expert < num_experts)


@triton.jit
def _place(
    ids_ptr, counts_ptr, ends_ptr, order_ptr, place_ptr, own_ends_ptr, size, num_experts,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    nth = tl.arange(0, CHUNK)
    at = tl.program_id(0) * CHUNK + nth
    inside = at < size
    ids = tl.load(ids_ptr + at, mask=inside, other=-1).to(tl.int32)
    is_before = (ids[:, None] == ids[None, :]) & (nth[None, :] < nth[:, None])
    at_count = ids * tl.num_programs(0) + tl.program_id(0)
    end = tl.load(ends_ptr + at_count, mask=inside, other=0)
    count = tl.load(counts_ptr + at_count, mask=inside, other=0)
    place = end - count + tl.sum(is_before.to(tl.int32), 1)
    tl.store(place_ptr + at, place, mask=inside)
    tl.store(order_ptr + place, at, mask=inside)
    if tl.program_id(0) == 0:
        # An expert's rows end with those of the last chunk.
        expert = tl.arange(0, EXPERTS)
        at_last = (expert + 1) * tl.num_programs(0) - 1
        own_end = tl.load(ends_ptr + at_last, mask=expert < num_experts, other=0)
        tl.store(own_ends_ptr + expert, own_end, mask=expert < num_experts)


@triton.jit
def _cut(
    ends_ptr, tiles_ptr, num_experts, num_tiles,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS)
    end = tl.load(ends_ptr + expert, mask=expert < num_experts, other=0)
    is_later = (expert > 0) & (expert < num_experts)
    begin = tl.load(ends_ptr + expert - 1, mask=is_later, other=0)
    count = (end - begin + ROWS - 1) // ROWS
    last = tl.cumsum(count, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    own = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)
    is_own = expert[None, :] == own[:, None]
    nth = tile - tl.sum(tl.where(is_own, (last - count)[None, :], 0), 1)
    first = tl.sum(tl.where(is_own, begin[None, :], 0), 1) + nth * ROWS
    inside = tile < num_tiles
    tl.store(tiles_ptr + tile, tl.where(own < num_experts, own, -1), mask=inside)
    tl.store(tiles_ptr + num_tiles + tile, first, mask=inside)
    own_end = tl.sum(tl.where(is_own, end[None, :], 0), 1)
    tl.store(tiles_ptr + 2 * num_tiles + tile, own_end, mask=inside)
