"""Draws from what top-k, top-p and min-p leave, on the device: ops/cut.py has the definition.

Nothing is sorted. A cut keeps a beginning of the order by logits, so it is known by its least
logit, and by how many words with just this logit it keeps: the first ones.

    sums of tiles   the largest logit and the sum of weights of every 64 words
    floor           per row, a logit that certainly is no larger than the least one that is kept:
                    the k-th largest of the tiles' largest logits, or one below which all words
                    together hold less than the share 1 - p, or the one that min-p demands
    gather          ids of the words above the floor, in order; a few parts of the vocabulary each
    draw            among these the least logit is searched exactly; the rest is cut off, and the
                    request's noise falls on what is left

The search compares with eight values at a time, in the order of floats as integers. Words above the
floor usually fit into one program's registers; where they do not, further ones are read again in
each round, so that any cut of any distribution is right.

Suffixes: `_B` rows, `_V` vocabulary, `_T` tiles of it, `_P` parts of it, `_W` words of all parts.
"""

# Triton compiles its kernels from source: pyright misreads their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.sampling import TILE, TILE_AGAIN, draw_and_move
from homeostat.rollout.native.cuda.state import Rows

# Parts of the vocabulary that are gathered by one program each, and words that it reads at a time.
_PARTS, _WORDS = 32, 2048
# Words that are searched in registers, and values that a round of the search tries.
_SIZE, _WAYS = 512, 8
# Values that a round tries where floors are searched: there are more tiles than words to search.
_FLOOR_WAYS = 4
# A floor may be too low by so many steps of its order (0.1 of a logit of 20): a few more words are
# gathered.
_SLACK = 1 << 16


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
    # Tiles beyond the vocabulary are nowhere, and not stored.
    finite = tl.where(tops == float("-inf"), 0.0, tops)
    sums = tl.sum(tl.exp(z - finite[:, None]), 1)
    at_t = part * (WORDS // TILE) + tl.arange(0, WORDS // TILE)
    is_tile = at_t < NUM_TILES
    tl.store(tops_ptr + row * NUM_TILES + at_t, tops, mask=is_tile)
    tl.store(sums_ptr + row * NUM_TILES + at_t, sums, mask=is_tile)


@triton.jit
def _order(z):
    """Return int32 that is ordered as the floats are."""
    bits = z.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(order):
    """Undo `_order`."""
    order = order.to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _below(order, masses, rests, tries, top, TILE: tl.constexpr):
    """Return bounds of the mass of all words below some logits, from what tiles tell.

    A tile with a smaller largest logit counts with its mass. Of another one all words but the
    largest, its rest, may lie below, each with less than the weight of that logit.
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
    order = _order(tops)
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
        # A little less than what may be left out, for rounding.
        spare = ((1.0 - top_p) * total * (1.0 - 1e-4)).to(tl.float32)
        # As many words as there are of this weight are still too little.
        low = _order(top + tl.log(spare / vocabulary) - 0.01).to(tl.int64)
        while high - low > SLACK:
            stride = (high - low + WAYS - 1) // WAYS
            tries = (low + (1 + tl.arange(0, WAYS)).to(tl.int64) * stride).to(tl.int32)
            below = _below(order, masses, rests, tries, top, TILE)
            low += tl.sum((below <= spare).to(tl.int64), 0) * stride
            high = tl.minimum(high, low + stride)
        floor = _value(low)
    # Shares among the first k words are of their sum, for which all of these are needed.
    if (min_p > 0) & ((top_p >= 1.0) | (top_k >= vocabulary)):
        # A hundredth covers the rounding of exp.
        floor = tl.maximum(floor, top + tl.log(min_p) - 0.01)
    tl.store(row_ptr + 2 * row, top)
    tl.store(row_ptr + 2 * row + 1, floor)
    tl.store(total_ptr + row, total)


@triton.jit
def _gather(
    logits_ptr, scale_ptr, tops_ptr, is_cut_ptr, row_ptr, places_ptr, counts_ptr, vocabulary,
    NUM_TILES: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PART_WORDS: tl.constexpr,
    WORDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(is_cut_ptr + row) == 0:
        return
    floor, scale = tl.load(row_ptr + 2 * row + 1), tl.load(scale_ptr + row)
    out_ptr = places_ptr + (row.to(tl.int64) * PARTS + part) * PART_WORDS
    logits_ptr += row.to(tl.int64) * vocabulary
    count = 0
    for start in range(0, PART_WORDS, WORDS):
        at_v = part * PART_WORDS + start + tl.arange(0, WORDS)
        is_word = at_v < vocabulary
        # Only tiles that have such a word are read.
        tops_at = tops_ptr + row * NUM_TILES + at_v // TILE
        is_wanted = tl.load(tops_at, mask=is_word, other=float("-inf")) >= floor
        is_wanted = is_wanted & is_word
        if tl.max(is_wanted.to(tl.int32), 0) > 0:
            z = tl.load(logits_ptr + at_v, mask=is_wanted, other=float("-inf")) * scale
            is_in = (is_wanted & (z >= floor)).to(tl.int32)
            place = count + tl.cumsum(is_in, 0) - 1
            in_part = start + tl.arange(0, WORDS)
            tl.store(out_ptr + place, in_part.to(out_ptr.dtype.element_ty), mask=is_in != 0)
            count += tl.sum(is_in, 0)
    tl.store(counts_ptr + row * PARTS + part, count)


@triton.jit
def _words(
    start, num, ends, places_ptr, logits_ptr, scale, top,
    PARTS: tl.constexpr, PART_WORDS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return ids, orders and weights of the gathered words from `start` on; -1 where none is."""
    at = start + tl.arange(0, SIZE)
    is_in = at < num
    is_behind = at[:, None] >= ends[None, :]
    part = tl.minimum(tl.sum(is_behind.to(tl.int32), 1), PARTS - 1)
    place = at - tl.max(tl.where(is_behind, ends[None, :], 0), 1)
    in_part = tl.load(places_ptr + part * PART_WORDS + place, mask=is_in, other=0)
    ids = part * PART_WORDS + in_part.to(tl.int32)
    z = tl.load(logits_ptr + ids, mask=is_in, other=float("-inf")) * scale
    weights = tl.where(is_in, tl.exp(z - top), 0.0)
    return tl.where(is_in, ids, -1), _order(z), weights


@triton.jit
def _reached(ids, order, weights, tries, BY_MASS: tl.constexpr):
    """Return the number, or the mass, of words down to each of some orders."""
    is_in = (order[:, None] >= tries[None, :]) & (ids >= 0)[:, None]
    value = weights[:, None] if BY_MASS else 1.0
    return tl.sum(tl.where(is_in, value, 0.0), 0)


@triton.jit
def _least(
    wanted, lowest, highest, ids, order, weights, num, ends, places_ptr, logits_ptr, scale, top,
    BY_MASS: tl.constexpr, PARTS: tl.constexpr, PART_WORDS: tl.constexpr, SIZE: tl.constexpr,
    WAYS: tl.constexpr,
):  # fmt: skip
    """Return the largest order down to which words reach what is wanted, what lies above it (their
    number and mass), and the weight of a word just there."""
    low, high = lowest.to(tl.int64), highest.to(tl.int64) + 1
    while high - low > 1:
        stride = (high - low + WAYS - 1) // WAYS
        tries = (low + (1 + tl.arange(0, WAYS)).to(tl.int64) * stride).to(tl.int32)
        held = _reached(ids, order, weights, tries, BY_MASS)
        for start in range(SIZE, num, SIZE):
            more, later, lighter = _words(
                start, num, ends, places_ptr, logits_ptr, scale, top, PARTS, PART_WORDS, SIZE
            )
            held += _reached(more, later, lighter, tries, BY_MASS)
        low += tl.sum((held >= wanted).to(tl.int64), 0) * stride
        high = tl.minimum(high, low + stride)
    found = low.to(tl.int32)
    num_above = tl.sum(((order > found) & (ids >= 0)).to(tl.int32), 0)
    held_above = tl.sum(tl.where(order > found, weights, 0.0).to(tl.float64), 0)
    weight = tl.max(tl.where((order == found) & (ids >= 0), weights, 0.0), 0)
    for start in range(SIZE, num, SIZE):
        more, later, lighter = _words(
            start, num, ends, places_ptr, logits_ptr, scale, top, PARTS, PART_WORDS, SIZE
        )
        num_above += tl.sum(((later > found) & (more >= 0)).to(tl.int32), 0)
        held_above += tl.sum(tl.where(later > found, lighter, 0.0).to(tl.float64), 0)
        is_there = (later == found) & (more >= 0)
        weight = tl.maximum(weight, tl.max(tl.where(is_there, lighter, 0.0), 0))
    return found, num_above, held_above, weight


@triton.jit
def _bound(
    top_k, top_p, total, ids, order, weights, num, ends, places_ptr, logits_ptr, scale, top,
    vocabulary, PARTS: tl.constexpr, PART_WORDS: tl.constexpr, SIZE: tl.constexpr,
    WAYS: tl.constexpr,
):  # fmt: skip
    """Return the order down to which words are kept, and how many of those just there."""
    lowest = tl.min(tl.where(ids >= 0, order, 2147483647), 0)
    highest = tl.max(tl.where(ids >= 0, order, -2147483647), 0)
    for start in range(SIZE, num, SIZE):
        more, later, _ = _words(
            start, num, ends, places_ptr, logits_ptr, scale, top, PARTS, PART_WORDS, SIZE
        )
        lowest = tl.minimum(lowest, tl.min(tl.where(more >= 0, later, 2147483647), 0))
        highest = tl.maximum(highest, tl.max(tl.where(more >= 0, later, -2147483647), 0))
    least, ties, mass = lowest, num, total
    if (top_k < vocabulary) & (top_k <= num):
        least, num_above, held, weight = _least(
            top_k.to(tl.float32), lowest, highest, ids, order, weights, num, ends, places_ptr,
            logits_ptr, scale, top, False, PARTS, PART_WORDS, SIZE, WAYS,
        )  # fmt: skip
        ties = top_k - num_above
        mass = held + ties * weight.to(tl.float64)
    if top_p < 1.0:
        low, _, held, weight = _least(
            (top_p * mass).to(tl.float32), lowest, highest, ids, order, weights, num, ends,
            places_ptr, logits_ptr, scale, top, True, PARTS, PART_WORDS, SIZE, WAYS,
        )  # fmt: skip
        needed = tl.ceil((top_p * mass - held) / tl.maximum(weight, 1e-38))
        # Where rounding leaves too little mass, as many as there are.
        own = tl.minimum(tl.maximum(needed, 1.0), 2147483000.0).to(tl.int32)
        ties = tl.where(low > least, own, tl.minimum(ties, own))
        least = tl.maximum(least, low)
    return least, ties


@triton.jit
def _is_kept(ids, order, weights, least, ties, num_ties, min_p):
    """Return which words are kept, and the number of words just at the bound so far."""
    is_tie = ((order == least) & (ids >= 0)).to(tl.int32)
    is_kept = (order > least) & (ids >= 0)
    is_kept = is_kept | ((is_tie != 0) & (num_ties + tl.cumsum(is_tie, 0) <= ties))
    return is_kept & (weights >= min_p), num_ties + tl.sum(is_tie, 0)


@triton.jit
def _note(ids, weights, is_kept, num_kept, kept_ptr, width):
    """Write the ids that are kept after the first `num_kept`; return their number and mass."""
    kept = is_kept.to(tl.int32)
    place = num_kept + tl.cumsum(kept, 0) - 1
    tl.store(kept_ptr + place, ids, mask=is_kept & (place < width))
    return tl.sum(kept, 0), tl.sum(tl.where(is_kept, weights, 0.0).to(tl.float64), 0)


@triton.jit
def _fallen_on(ids, weights, is_kept, before, wanted, none):
    """Return the first kept word whose sum of weights is above what is wanted, the last one with a
    weight, and the sum."""
    has_weight = is_kept & (weights > 0)
    held = tl.where(has_weight, weights, 0.0).to(tl.float64)
    is_past = has_weight & (before + tl.cumsum(held, 0) > wanted)
    first = tl.min(tl.where(is_past, ids, none), 0)
    return first, tl.max(tl.where(has_weight, ids, 0), 0), before + tl.sum(held, 0)


@triton.jit
def _draw_kept(
    logits_ptr, scale_ptr, is_cut_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row_ptr, total_ptr,
    places_ptr, counts_ptr, noise_ptr, tokens_ptr, positions_ptr, starts_ptr, moves_ptr, drawn_ptr,
    logps_ptr, sampled_logps_ptr, sizes_ptr, kept_ptr, vocabulary, width, step_stride,
    PARTS: tl.constexpr, PART_WORDS: tl.constexpr, SIZE: tl.constexpr, WAYS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0)
    position, moves = tl.load(positions_ptr + row), tl.load(moves_ptr + row)
    step = position - tl.load(starts_ptr + row)
    if tl.load(is_cut_ptr + row) == 0:
        # It was drawn already, and moved on.
        noted = (step - moves) * step_stride + row
        tl.store(sizes_ptr + noted, 0)
        tl.store(sampled_logps_ptr + noted, tl.load(logps_ptr + noted))
        return
    noted = step * step_stride + row
    noise, min_p = tl.load(noise_ptr + noted), tl.load(min_p_ptr + row)
    top, total = tl.load(row_ptr + 2 * row), tl.load(total_ptr + row)
    scale = tl.load(scale_ptr + row)
    counts = tl.load(counts_ptr + row * PARTS + tl.arange(0, PARTS))
    ends, num = tl.cumsum(counts, 0), tl.sum(counts, 0)
    logits_ptr += row.to(tl.int64) * vocabulary
    places_ptr += row.to(tl.int64) * PARTS * PART_WORDS
    kept_ptr += noted.to(tl.int64) * width
    ids, order, weights = _words(
        0, num, ends, places_ptr, logits_ptr, scale, top, PARTS, PART_WORDS, SIZE
    )
    least, ties = _bound(
        tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), total, ids, order, weights, num, ends,
        places_ptr, logits_ptr, scale, top, vocabulary, PARTS, PART_WORDS, SIZE, WAYS,
    )  # fmt: skip
    # One pass for what is kept, and one for the token that the noise falls on.
    is_kept, num_ties = _is_kept(ids, order, weights, least, ties, 0, min_p)
    num_kept, kept_sum = _note(ids, weights, is_kept, 0, kept_ptr, width)
    first_ties = num_ties
    for start in range(SIZE, num, SIZE):
        more, later, lighter = _words(
            start, num, ends, places_ptr, logits_ptr, scale, top, PARTS, PART_WORDS, SIZE
        )
        is_more, num_ties = _is_kept(more, later, lighter, least, ties, num_ties, min_p)
        num_more, held = _note(more, lighter, is_more, num_kept, kept_ptr, width)
        num_kept += num_more
        kept_sum += held
    wanted = noise * kept_sum
    token, last, before = _fallen_on(ids, weights, is_kept, noise * 0.0, wanted, vocabulary)
    for start in range(SIZE, num, SIZE):
        more, later, lighter = _words(
            start, num, ends, places_ptr, logits_ptr, scale, top, PARTS, PART_WORDS, SIZE
        )
        is_more, first_ties = _is_kept(more, later, lighter, least, ties, first_ties, min_p)
        first, late, before = _fallen_on(more, lighter, is_more, before, wanted, vocabulary)
        token, last = tl.minimum(token, first), tl.maximum(last, late)
    # Where rounding leaves none, the last one; only where nothing is a number there is none at all.
    token = tl.minimum(token, last)
    chosen = (tl.load(logits_ptr + token) * scale - top).to(tl.float64)
    tl.store(drawn_ptr + noted, token)
    tl.store(logps_ptr + noted, (chosen - tl.log(total)).to(tl.float32))
    tl.store(sampled_logps_ptr + noted, (chosen - tl.log(kept_sum)).to(tl.float32))
    tl.store(sizes_ptr + noted, tl.where(num_kept < vocabulary, num_kept, 0))
    tl.store(tokens_ptr + row, token)
    tl.store(positions_ptr + row, position + moves)


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


def draw_kept(logits_BV: Tensor, tops_BT: Tensor, sums_BT: Tensor, state: Rows) -> None:
    """Draw the next token of each row, of rows that are cut among what is kept."""
    (num_rows, vocabulary), cut = logits_BV.shape, state.cut
    assert cut is not None, "the state has been prepared for cut rows"
    num_tiles, flags = tops_BT.shape[1], early(logits_BV.device)
    part_words = triton.cdiv(triton.cdiv(vocabulary, _PARTS), _WORDS) * _WORDS
    settings = (cut.is_cut_B, cut.top_k_B, cut.top_p_B, cut.min_p_B)
    row_B2 = tops_BT.new_empty(num_rows, 2)
    total_B = tops_BT.new_empty(num_rows, dtype=torch.float64)
    place_dtype = torch.int16 if part_words < 2**15 else torch.int32
    places_BPW = tops_BT.new_empty(num_rows, _PARTS, part_words, dtype=place_dtype)
    counts_BP = tops_BT.new_empty(num_rows, _PARTS, dtype=torch.int32)
    _floors[(num_rows,)](
        tops_BT, sums_BT, *settings, row_B2, total_B, vocabulary,
        NUM_TILES=num_tiles, PADDED_TILES=triton.next_power_of_2(num_tiles), TILE=TILE_AGAIN,
        WAYS=_FLOOR_WAYS, SLACK=_SLACK, num_warps=16, **flags,
    )  # fmt: skip
    _gather[(num_rows, _PARTS)](
        logits_BV, state.scale_B, tops_BT, cut.is_cut_B, row_B2, places_BPW, counts_BP, vocabulary,
        NUM_TILES=num_tiles, TILE=TILE_AGAIN, PARTS=_PARTS, PART_WORDS=part_words, WORDS=_WORDS,
        num_warps=8, **flags,
    )  # fmt: skip
    logits = {"logits_BV": logits_BV, "is_cut_B": cut.is_cut_B}
    draw_and_move(state, tops_BT, sums_BT, vocabulary, TILE_AGAIN, **logits)
    _draw_kept[(num_rows,)](
        logits_BV, state.scale_B, *settings, row_B2, total_B, places_BPW, counts_BP,
        state.noise_SB, state.tokens_B, state.positions_B, state.starts_B, state.moves_B,
        state.drawn_SB, state.logps_SB, cut.sampled_logps_SB, cut.sizes_SB, cut.kept_SBK,
        vocabulary, cut.kept_SBK.shape[2], state.noise_SB.stride(0),
        PARTS=_PARTS, PART_WORDS=part_words, SIZE=_SIZE, WAYS=_WAYS, num_warps=4, **flags,
    )  # fmt: skip
