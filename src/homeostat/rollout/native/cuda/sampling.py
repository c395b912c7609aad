"""Draws the next token of each sequence from its logits, on the device.

The vocabulary is cut into tiles. A first pass finds each tile's largest logit and the sum of its
weights; a second finds, per sequence, the tile in which the request's noise falls, and then the
token in it: inverse CDF, as in `native.sampler`, whose definition this follows to rounding. The
logits are read once.

The second pass also moves the sequence on: the token is its next input, its position grows by one,
and what was drawn is noted under the number of the step. A graph of it needs nothing of the host.

Suffixes: `_B` sequences, `_V` vocabulary, `_T` tiles of it, `_S` steps of a burst.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.state import Rows

TILE = 2048


@triton.jit
def _tile_sums(
    logits_ptr,
    scale_ptr,
    tops_ptr,
    sums_ptr,
    vocabulary,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row, tile = tl.program_id(0), tl.program_id(1)
    at_v = tile * TILE + tl.arange(0, TILE)
    scale = tl.load(scale_ptr + row)
    z = tl.load(
        logits_ptr + row.to(tl.int64) * vocabulary + at_v,
        mask=at_v < vocabulary,
        other=float("-inf"),
    )
    z = z * scale
    top = tl.max(z, 0)
    tl.store(tops_ptr + row * NUM_TILES + tile, top)
    tl.store(sums_ptr + row * NUM_TILES + tile, tl.sum(tl.exp(z - top), 0))


@triton.jit
def _first_above(cdf, weights, wanted, at, is_in, none):
    """The first place with a weight whose sum so far is above what is wanted; where rounding leaves
    none, the last one with a weight."""
    has_weight = is_in & (weights > 0)
    found = tl.min(tl.where(has_weight & (cdf > wanted), at, none), 0)
    return tl.minimum(found, tl.max(tl.where(has_weight, at, 0), 0))


@triton.jit
def _draw(
    logits_ptr, scale_ptr, greedy_ptr, tops_ptr, sums_ptr, noise_ptr, tokens_ptr, positions_ptr,
    starts_ptr, moves_ptr, drawn_ptr, logps_ptr, vocabulary, step_stride,
    NUM_TILES: tl.constexpr, PADDED_TILES: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0)
    position = tl.load(positions_ptr + row)
    step = position - tl.load(starts_ptr + row)
    noise = tl.load(noise_ptr + step * step_stride + row)
    is_greedy = tl.load(greedy_ptr + row) != 0

    at_t = tl.arange(0, PADDED_TILES)
    is_tile = at_t < NUM_TILES
    tops = tl.load(tops_ptr + row * NUM_TILES + at_t, mask=is_tile, other=float("-inf"))
    sums = tl.load(sums_ptr + row * NUM_TILES + at_t, mask=is_tile, other=0.0)
    top = tl.max(tops, 0)
    weights = (sums * tl.exp(tops - top)).to(tl.float64)
    total = tl.sum(weights, 0)
    wanted = noise * total
    by_noise = _first_above(tl.cumsum(weights, 0), weights, wanted, at_t, is_tile, PADDED_TILES)
    by_size = tl.min(tl.where(tops == top, at_t, PADDED_TILES), 0)
    # Only where nothing is a number is none of them found; the engine refuses the log-prob.
    tile = tl.minimum(tl.where(is_greedy, by_size, by_noise), NUM_TILES - 1)
    before = tl.sum(tl.where(at_t < tile, weights, 0.0), 0)

    at_v = tile * TILE + tl.arange(0, TILE)
    is_word = at_v < vocabulary
    at = logits_ptr + row.to(tl.int64) * vocabulary + at_v
    z = tl.load(at, mask=is_word, other=float("-inf")) * tl.load(scale_ptr + row)
    words = tl.exp(z - top)
    cdf = before + tl.cumsum(words.to(tl.float64), 0)
    by_noise = _first_above(cdf, words, wanted, at_v, is_word, vocabulary)
    by_size = tl.min(tl.where(is_word & (z == top), at_v, vocabulary), 0)
    token = tl.minimum(tl.where(is_greedy, by_size, by_noise), vocabulary - 1)
    chosen = tl.max(tl.where(at_v == token, z, float("-inf")), 0)
    logp = (chosen - top).to(tl.float64) - tl.log(total)

    tl.store(drawn_ptr + step * step_stride + row, token)
    tl.store(logps_ptr + step * step_stride + row, logp.to(tl.float32))
    tl.store(tokens_ptr + row, token)
    tl.store(positions_ptr + row, position + tl.load(moves_ptr + row))


def draw_and_move(logits_BV: Tensor, state: Rows) -> None:
    num_rows, vocabulary = logits_BV.shape
    num_tiles = triton.cdiv(vocabulary, TILE)
    tops_BT = logits_BV.new_empty(num_rows, num_tiles)
    sums_BT = torch.empty_like(tops_BT)
    _tile_sums[(num_rows, num_tiles)](
        logits_BV,
        state.scale_B,
        tops_BT,
        sums_BT,
        vocabulary,
        NUM_TILES=num_tiles,
        TILE=TILE,
        **early(logits_BV.device),
    )
    _draw[(num_rows,)](
        logits_BV,
        state.scale_B,
        state.greedy_B,
        tops_BT,
        sums_BT,
        state.noise_SB,
        state.tokens_B,
        state.positions_B,
        state.starts_B,
        state.moves_B,
        state.drawn_SB,
        state.logps_SB,
        vocabulary,
        state.noise_SB.stride(0),
        NUM_TILES=num_tiles,
        PADDED_TILES=triton.next_power_of_2(num_tiles),
        TILE=TILE,
        num_warps=8,
        **early(logits_BV.device),
    )
