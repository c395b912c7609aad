"""Finds, on the device, the words of each row that a cut may keep: the first half of cutting.py.

    sums of tiles   the largest logit and the sum of weights of every 64 words
    floor           per row, a logit that is certainly not above the smallest one that is kept:
                    the k-th largest of the tiles' largest logits, or a logit below which all words
                    together have less than the share 1 - p, or the logit that min-p asks for
    gather          ids of the words above the floor, in order; a few parts of the vocabulary each

Suffixes: `_B` rows, `_V` vocabulary, `_T` tiles of it, `_P` parts of it, `_W` words of a part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.sampling import TILE, TILE_AGAIN
from homeostat.rollout.native.cuda.state import CutRows

# Parts of the vocabulary that are gathered by one program each.
PARTS = 32
# Values that a round of the search for a floor tries.
_WAYS = 4
# A floor may be too low by this many steps of the order (0.1 for a logit of 20); then a few more
# words are gathered.
_SLACK = 1 << 16


@dataclass(frozen=True, slots=True)
class Candidates:
    """The words that may be kept. `row_B2` are the largest logit and the floor of each row,
    `total_B` the sum of all its weights; `places_BPW` the words' places in their part, of which
    the first `counts_BP` count."""

    row_B2: Tensor
    total_B: Tensor
    places_BPW: Tensor
    counts_BP: Tensor

    @property
    def part_words(self) -> int:
        return self.places_BPW.shape[2]


@triton.jit
def _sums_of_tiles(
    logits_ptr, scale_ptr, tops_ptr, sums_ptr, vocabulary,
    NUM_TILES: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row, part = tl.program_id(0), tl.program_id(1)
    at_v = part * WORDS + tl.arange(0, WORDS)
    at = logits_ptr + row.to(tl.int64) * vocabulary + at_v
    z = tl.load(at, mask=at_v < vocabulary, other=float("-inf")) * tl.load(scale_ptr + row)
    z = tl.reshape(z, (WORDS // TILE, TILE))
    tops = tl.max(z, 1)
    # Tiles beyond the vocabulary are not stored.
    finite = tl.where(tops == float("-inf"), 0.0, tops)
    sums = tl.sum(tl.exp(z - finite[:, None]), 1)
    at_t = part * (WORDS // TILE) + tl.arange(0, WORDS // TILE)
    is_tile = at_t < NUM_TILES
    tl.store(tops_ptr + row * NUM_TILES + at_t, tops, mask=is_tile)
    tl.store(sums_ptr + row * NUM_TILES + at_t, sums, mask=is_tile)


@triton.jit
def order_of(z):
    """Return int32 that is ordered as the floats are."""
    bits = z.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(order):
    """Undo `order_of`."""
    order = order.to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _below(order, masses, rests, tries, top, TILE: tl.constexpr):
    """Return bounds of the mass of all words below some logits, from the sums of the tiles.

    A tile whose largest logit is smaller counts with its whole mass. In any other tile, all words
    except the largest may lie below, each with less than the weight of that logit.
    """
    most = (TILE - 1) * tl.exp(_value(tries) - top)
    inside = tl.minimum(rests[:, None], most[None, :])
    return tl.sum(tl.where(order[:, None] < tries[None, :], masses[:, None], inside), 0)


@triton.jit
def _floors(
    tops_ptr, sums_ptr, is_cut_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row_ptr, total_ptr,
    vocabulary,
    NUM_TILES: tl.constexpr, PADDED_TILES: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
    SLACK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0)
    if tl.load(is_cut_ptr + row) == 0:
        return
    at_t = tl.arange(0, PADDED_TILES)
    is_tile = at_t < NUM_TILES
    tops = tl.load(tops_ptr + row * NUM_TILES + at_t, mask=is_tile, other=float("-inf"))
    sums = tl.load(sums_ptr + row * NUM_TILES + at_t, mask=is_tile, other=1.0)
    top = tl.max(tops, 0)
    weights = tl.exp(tops - top)
    masses, rests = sums * weights, (sums - 1.0) * weights
    total = tl.sum(masses.to(tl.float64), 0)
    top_k, top_p, min_p = (
        tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    )  # fmt: skip
    floor = top * 0.0 + float("-inf")
    order = order_of(tops)
    low, high = tl.min(order, 0).to(tl.int64), tl.max(order, 0).to(tl.int64) + 1
    if top_k < vocabulary:
        low = tl.min(tl.where(is_tile, order, 2147483647), 0).to(tl.int64)
        while (top_k <= NUM_TILES) & (high - low > SLACK):
            stride = (high - low + WAYS - 1) // WAYS
            tries = (low + (1 + tl.arange(0, WAYS)).to(tl.int64) * stride).to(tl.int32)
            num = tl.sum((is_tile[:, None] & (order[:, None] >= tries[None, :])).to(tl.int32), 0)
            low += tl.sum((num >= top_k).to(tl.int64), 0) * stride
            high = tl.minimum(high, low + stride)
        floor = tl.where(top_k <= NUM_TILES, _value(low), floor)
    elif top_p < 1.0:
        # Slightly less than may be left out, to allow for rounding.
        spare = ((1.0 - top_p) * total * (1.0 - 1e-4)).to(tl.float32)
        # All words of this weight together are still too few.
        low = order_of(top + tl.log(spare / vocabulary) - 0.01).to(tl.int64)
        while high - low > SLACK:
            stride = (high - low + WAYS - 1) // WAYS
            tries = (low + (1 + tl.arange(0, WAYS)).to(tl.int64) * stride).to(tl.int32)
            below = _below(order, masses, rests, tries, top, TILE)
            low += tl.sum((below <= spare).to(tl.int64), 0) * stride
            high = tl.minimum(high, low + stride)
        floor = _value(low)
    # With top-k, top-p is a share of the sum of the first k words, so all of these are needed.
    if (min_p > 0) & ((top_p >= 1.0) | (top_k >= vocabulary)):
        # A hundredth covers the rounding of exp.
        floor = tl.maximum(floor, top + tl.log(min_p) - 0.01)
    tl.store(row_ptr + 2 * row, top)
    tl.store(row_ptr + 2 * row + 1, floor)
    tl.store(total_ptr + row, total)


@triton.jit
def _gather(
    logits_ptr, scale_ptr, tops_ptr, is_cut_ptr, row_ptr, places_ptr, counts_ptr, vocabulary,
    NUM_TILES: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PART_TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(is_cut_ptr + row) == 0:
        return
    floor, scale = tl.load(row_ptr + 2 * row + 1), tl.load(scale_ptr + row)
    out_ptr = places_ptr + (row.to(tl.int64) * PARTS + part) * PART_TILES * TILE
    logits_ptr += row.to(tl.int64) * vocabulary + part * PART_TILES * TILE
    num_words = vocabulary - part * PART_TILES * TILE
    at_t = tl.arange(0, PADDED_TILES)
    is_tile = (at_t < PART_TILES) & (part * PART_TILES + at_t < NUM_TILES)
    tops_at = tops_ptr + row * NUM_TILES + part * PART_TILES + at_t
    is_wanted = tl.load(tops_at, mask=is_tile, other=float("-inf")) >= floor
    # Only tiles that have such a word are read, one after the other.
    is_wanted = is_wanted & is_tile
    count = 0
    tile = tl.min(tl.where(is_wanted, at_t, PADDED_TILES), 0)
    while tile < PADDED_TILES:
        at_v = tile * TILE + tl.arange(0, TILE)
        is_word = at_v < num_words
        z = tl.load(logits_ptr + at_v, mask=is_word, other=float("-inf")) * scale
        is_in = (is_word & (z >= floor)).to(tl.int32)
        place = count + tl.cumsum(is_in, 0) - 1
        tl.store(out_ptr + place, at_v.to(out_ptr.dtype.element_ty), mask=is_in != 0)
        count += tl.sum(is_in, 0)
        tile = tl.min(tl.where(is_wanted & (at_t > tile), at_t, PADDED_TILES), 0)
    tl.store(counts_ptr + row * PARTS + part, count)


def sums_of_tiles(logits_BV: Tensor, scale_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, T] each: a tile's largest logit, over the temperature, and the sum of weights."""
    num_rows, vocabulary = logits_BV.shape
    num_tiles = triton.cdiv(vocabulary, TILE_AGAIN)
    tops_BT = logits_BV.new_empty(num_rows, num_tiles)
    sums_BT = torch.empty_like(tops_BT)
    _sums_of_tiles[(num_rows, triton.cdiv(vocabulary, TILE))](
        logits_BV, scale_B, tops_BT, sums_BT, vocabulary,
        NUM_TILES=num_tiles, WORDS=TILE, TILE=TILE_AGAIN, **early(logits_BV.device),
    )  # fmt: skip
    return tops_BT, sums_BT


def find_candidates(
    logits_BV: Tensor, tops_BT: Tensor, sums_BT: Tensor, scale_B: Tensor, cut: CutRows
) -> Candidates:
    """Find the words that the cut of each row may keep, from its logits and its tiles' sums."""
    (num_rows, vocabulary), num_tiles = logits_BV.shape, tops_BT.shape[1]
    part_tiles = triton.cdiv(num_tiles, PARTS)
    part_words = part_tiles * TILE_AGAIN
    place_dtype = torch.int16 if part_words < 2**15 else torch.int32
    found = Candidates(
        row_B2=tops_BT.new_empty(num_rows, 2),
        total_B=tops_BT.new_empty(num_rows, dtype=torch.float64),
        places_BPW=tops_BT.new_empty(num_rows, PARTS, part_words, dtype=place_dtype),
        counts_BP=tops_BT.new_empty(num_rows, PARTS, dtype=torch.int32),
    )
    flags = early(logits_BV.device)
    _floors[(num_rows,)](
        tops_BT, sums_BT, cut.is_cut_B, cut.top_k_B, cut.top_p_B, cut.min_p_B, found.row_B2,
        found.total_B, vocabulary,
        NUM_TILES=num_tiles, PADDED_TILES=triton.next_power_of_2(num_tiles), TILE=TILE_AGAIN,
        WAYS=_WAYS, SLACK=_SLACK, num_warps=16, **flags,
    )  # fmt: skip
    _gather[(num_rows, PARTS)](
        logits_BV, scale_B, tops_BT, cut.is_cut_B, found.row_B2, found.places_BPW, found.counts_BP,
        vocabulary,
        NUM_TILES=num_tiles, TILE=TILE_AGAIN, PARTS=PARTS, PART_TILES=part_tiles,
        PADDED_TILES=triton.next_power_of_2(part_tiles), num_warps=1, **flags,
    )  # fmt: skip
    return found
