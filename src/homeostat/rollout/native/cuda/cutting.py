"""Samples, on the device, from the words that top-k, top-p and min-p keep (defined in ops/cut.py).

Nothing is sorted. A cut keeps the words with the largest logits, so two numbers describe it: its
smallest logit, and how many words with exactly this logit it keeps (the first ones). The smallest
logit is searched exactly among the words that may be kept (candidates.py); then a word is drawn
from those at or above it.

The search tries eight values at a time, with floats compared as integers of the same order. The
candidates usually fit into the registers of one program; further ones are read again in each round,
so the result is exact for every cut and distribution.

Suffixes: `_B` rows, `_V` vocabulary, `_T` tiles of it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda.candidates import PARTS, find_candidates, order_of
from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.sampling import TILE_AGAIN, draw_and_move
from homeostat.rollout.native.cuda.state import Rows

# Words that are searched in registers, and values that a round of the search tries.
_SIZE, _WAYS = 512, 8


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
    return tl.where(is_in, ids, -1), order_of(z), weights


@triton.jit
def _reached(ids, order, weights, tries, BY_MASS: tl.constexpr):
    """Return the number, or the mass, of the words at or above each of some orders."""
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
        # If rounding leaves too little mass, keep all of them.
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
def _token(
    wanted, ids, weights, is_kept, least, ties, num_ties, min_p, num, ends, places_ptr, logits_ptr,
    scale, top, vocabulary, PARTS: tl.constexpr, PART_WORDS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return the first kept word whose sum of weights is above what is wanted; where rounding
    leaves none, the last one, and only where nothing is a number none at all."""
    token, last, before = _fallen_on(ids, weights, is_kept, wanted * 0.0, wanted, vocabulary)
    for start in range(SIZE, num, SIZE):
        more, later, lighter = _words(
            start, num, ends, places_ptr, logits_ptr, scale, top, PARTS, PART_WORDS, SIZE
        )
        is_more, num_ties = _is_kept(more, later, lighter, least, ties, num_ties, min_p)
        first, late, before = _fallen_on(more, lighter, is_more, before, wanted, vocabulary)
        token, last = tl.minimum(token, first), tl.maximum(last, late)
    return tl.minimum(token, last)


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
        # This row has no cut: its token was already drawn.
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
    # One pass finds what is kept, a second one the token that the noise selects.
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
    token = _token(
        noise * kept_sum, ids, weights, is_kept, least, ties, first_ties, min_p, num, ends,
        places_ptr, logits_ptr, scale, top, vocabulary, PARTS, PART_WORDS, SIZE,
    )  # fmt: skip
    chosen = (tl.load(logits_ptr + token) * scale - top).to(tl.float64)
    tl.store(drawn_ptr + noted, token)
    tl.store(logps_ptr + noted, (chosen - tl.log(total)).to(tl.float32))
    tl.store(sampled_logps_ptr + noted, (chosen - tl.log(kept_sum)).to(tl.float32))
    tl.store(sizes_ptr + noted, tl.where(num_kept < vocabulary, num_kept, 0))
    tl.store(tokens_ptr + row, token)
    tl.store(positions_ptr + row, position + moves)


def draw_kept(logits_BV: Tensor, tops_BT: Tensor, sums_BT: Tensor, state: Rows) -> None:
    """Draw the next token of each row; in rows with a cut, among the words that it keeps."""
    (num_rows, vocabulary), cut = logits_BV.shape, state.cut
    assert cut is not None, "the state has been prepared for cut rows"
    found = find_candidates(logits_BV, tops_BT, sums_BT, state.scale_B, cut)
    others = {"logits_BV": logits_BV, "is_cut_B": cut.is_cut_B}
    draw_and_move(state, tops_BT, sums_BT, vocabulary, TILE_AGAIN, **others)
    _draw_kept[(num_rows,)](
        logits_BV, state.scale_B, cut.is_cut_B, cut.top_k_B, cut.top_p_B, cut.min_p_B,
        found.row_B2, found.total_B, found.places_BPW, found.counts_BP,
        state.noise_SB, state.tokens_B, state.positions_B, state.starts_B, state.moves_B,
        state.drawn_SB, state.logps_SB, cut.sampled_logps_SB, cut.sizes_SB, cut.kept_SBK,
        vocabulary, cut.kept_SBK.shape[2], state.noise_SB.stride(0),
        PARTS=PARTS, PART_WORDS=found.part_words, SIZE=_SIZE, WAYS=_WAYS, num_warps=4,
        **early(logits_BV.device),
    )  # fmt: skip
