"""Draws the next token of each sequence, on the device.

The vocabulary is cut into tiles. A first pass finds each tile's largest logit and the sum of its
weights; a second finds, per sequence, the tile in which the request's noise falls, and then the
token in it: inverse CDF, as in `native.sampler`, whose definition this follows to rounding.

    draw_from_logits    from logits in memory
    draw_from_hidden    for many rows: the first pass computes logits but does not store them, and
                        the second one computes those of the chosen tile again

Rows to which top-k, top-p or min-p applies are drawn by cutting.py, which needs stored logits.

The second pass also advances the sequence: the token becomes its next input, its position grows by
one, and the token and its log-prob are recorded under the number of the step. A captured graph of
this needs nothing from the host.

Suffixes: `_B` sequences, `_D` model dim, `_V` vocabulary, `_T` tiles of it, `_S` steps of a burst.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.products import can_multiply
from homeostat.rollout.native.cuda.state import Rows

# Words of a tile: for logits in memory, and for logits that are computed again.
TILE, TILE_AGAIN = 2048, 64
# From so many rows on, a product that stores no logits is faster than a library's.
MIN_ROWS = 32
# Rows, words and inputs of a product's tile, and the number of its pipeline stages. A tile that
# stores logits has fewer words, because logits take shared memory before they are written.
_MAX_TILE_ROWS, _WORDS, _WORDS_KEPT, _INPUTS, _STAGES = 128, 256, 128, 64, 4
# Inputs of one step when the logits of the chosen tile are computed again.
_INPUTS_AGAIN = 128


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
def _multiplied_tile_sums(
    hidden_desc, weight_desc, scale_ptr, tops_ptr, sums_ptr, logits_ptr, num_rows, width,
    vocabulary,
    KEEPS_LOGITS: tl.constexpr, NUM_TILES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row_tiles = tl.cdiv(num_rows, ROWS)
    tiles: tl.constexpr = WORDS // TILE
    num_products = row_tiles * tl.cdiv(vocabulary, WORDS)
    # Programs that multiply the same words are neighbours. The loop is flattened, so that a tile's
    # inputs are loaded while the sums of the previous tile are computed.
    for index in tl.range(tl.program_id(0), num_products, tl.num_programs(0), flatten=True):
        row, word = (index % row_tiles) * ROWS, (index // row_tiles) * WORDS
        logits = tl.zeros((ROWS, WORDS), tl.float32)
        for start in range(0, width, INPUTS):
            hidden, weight = hidden_desc.load([row, start]), weight_desc.load([word, start])
            logits = tl.dot(hidden, tl.trans(weight), logits, input_precision=PRECISION)
        at_B, at_V = row + tl.arange(0, ROWS), word + tl.arange(0, WORDS)
        is_row = at_B < num_rows
        if KEEPS_LOGITS:
            at = logits_ptr + at_B[:, None].to(tl.int64) * vocabulary + at_V[None, :]
            tl.store(at, logits, mask=is_row[:, None] & (at_V < vocabulary)[None, :])
        scale = tl.load(scale_ptr + at_B, mask=is_row, other=1.0)
        z = tl.where((at_V < vocabulary)[None, :], logits * scale[:, None], float("-inf"))
        z = tl.reshape(z, (ROWS, tiles, TILE))
        tops = tl.max(z, 2)
        sums = tl.sum(tl.exp(z - tops[:, :, None]), 2)
        at_T = word // TILE + tl.arange(0, tiles)
        at = at_B[:, None] * NUM_TILES + at_T[None, :]
        is_in = is_row[:, None] & (at_T < NUM_TILES)[None, :]
        tl.store(tops_ptr + at, tops, mask=is_in)
        tl.store(sums_ptr + at, sums, mask=is_in)


@triton.jit
def _logits(hidden_ptr, weight_ptr, at_v, is_word, width, TILE: tl.constexpr, INPUTS: tl.constexpr):
    """Return the logits of some words for one row."""
    logits = tl.zeros((TILE,), tl.float32)
    for start in range(0, width, INPUTS):
        at_d = start + tl.arange(0, INPUTS)
        is_in = at_d < width
        hidden = tl.load(hidden_ptr + at_d, mask=is_in, other=0.0).to(tl.float32)
        at = at_v[:, None].to(tl.int64) * width + at_d[None, :]
        weight = tl.load(weight_ptr + at, mask=is_word[:, None] & is_in[None, :], other=0.0)
        logits += tl.sum(weight.to(tl.float32) * hidden[None, :], 1)
    return logits


@triton.jit
def _first_above(cdf, weights, wanted, at, is_in, none):
    """Return the first place with a weight at which the running sum exceeds `wanted`.

    If rounding leaves none, it is the last place with a weight.
    """
    has_weight = is_in & (weights > 0)
    found = tl.min(tl.where(has_weight & (cdf > wanted), at, none), 0)
    return tl.minimum(found, tl.max(tl.where(has_weight, at, 0), 0))


@triton.jit
def _draw(
    logits_ptr, hidden_ptr, weight_ptr, scale_ptr, greedy_ptr, tops_ptr, sums_ptr, noise_ptr,
    tokens_ptr, positions_ptr, starts_ptr, moves_ptr, drawn_ptr, logps_ptr, is_cut_ptr, vocabulary,
    width, step_stride,
    HAS_CUT: tl.constexpr, HAS_LOGITS: tl.constexpr, NUM_TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr, TILE: tl.constexpr, INPUTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0)
    if HAS_CUT:
        # cutting.py draws this row.
        if tl.load(is_cut_ptr + row) != 0:
            return
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
    # If all logits are NaN, none is found; the engine then refuses the log-prob.
    tile = tl.minimum(tl.where(is_greedy, by_size, by_noise), NUM_TILES - 1)
    before = tl.sum(tl.where(at_t < tile, weights, 0.0), 0)

    at_v = tile * TILE + tl.arange(0, TILE)
    is_word = at_v < vocabulary
    if HAS_LOGITS:
        at = logits_ptr + row.to(tl.int64) * vocabulary + at_v
        z = tl.load(at, mask=is_word, other=float("-inf"))
    else:
        at = hidden_ptr + row * width
        z = _logits(at, weight_ptr, at_v, is_word, width, TILE, INPUTS)
        z = tl.where(is_word, z, float("-inf"))
    z = z * tl.load(scale_ptr + row)
    words = tl.exp(z - top)
    cdf = before + tl.cumsum(words.to(tl.float64), 0)
    by_noise = _first_above(cdf, words, wanted, at_v, is_word, vocabulary)
    by_size = tl.min(tl.where(is_word & (z == tl.max(z, 0)), at_v, vocabulary), 0)
    token = tl.minimum(tl.where(is_greedy, by_size, by_noise), vocabulary - 1)
    chosen = tl.max(tl.where(at_v == token, z, float("-inf")), 0)
    # A logit that is computed again may exceed the largest one by a rounding error.
    logp = tl.where(chosen > top, 0.0, chosen - top).to(tl.float64) - tl.log(total)

    tl.store(drawn_ptr + step * step_stride + row, token)
    tl.store(logps_ptr + step * step_stride + row, logp.to(tl.float32))
    tl.store(tokens_ptr + row, token)
    tl.store(positions_ptr + row, position + tl.load(moves_ptr + row))


def draw_from_logits(logits_BV: Tensor, state: Rows) -> None:
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
    draw_and_move(state, tops_BT, sums_BT, vocabulary, TILE, logits_BV=logits_BV)


def can_draw_from_hidden(num_rows: int, weight_VD: Tensor) -> bool:
    return num_rows >= MIN_ROWS and weight_VD.is_contiguous() and can_multiply(weight_VD)


def draw_from_hidden(hidden_BD: Tensor, weight_VD: Tensor, state: Rows) -> None:
    tops_BT, sums_BT = multiplied_sums(hidden_BD, weight_VD, state.scale_B)
    product = hidden_BD, weight_VD
    draw_and_move(state, tops_BT, sums_BT, weight_VD.shape[0], TILE_AGAIN, product=product)


def multiplied_sums(
    hidden_BD: Tensor, weight_VD: Tensor, scale_B: Tensor, *, logits_BV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the largest logit, divided by the temperature, and the sum of weights of each tile.

    Both are [B, T]. The logits themselves are written to `logits_BV` if it is given.
    """
    (num_rows, width), vocabulary = hidden_BD.shape, weight_VD.shape[0]
    num_tiles = triton.cdiv(vocabulary, TILE_AGAIN)
    tops_BT = torch.empty(num_rows, num_tiles, device=hidden_BD.device, dtype=torch.float32)
    sums_BT = torch.empty_like(tops_BT)
    tile_rows = min(max(triton.next_power_of_2(num_rows), 64), _MAX_TILE_ROWS)
    words = _WORDS if logits_BV is None else _WORDS_KEPT
    num_products = triton.cdiv(num_rows, tile_rows) * triton.cdiv(vocabulary, words)
    _multiplied_tile_sums[(min(num_products, _num_programs(hidden_BD.device)),)](
        TensorDescriptor.from_tensor(hidden_BD, [tile_rows, _INPUTS]),
        TensorDescriptor.from_tensor(weight_VD, [words, _INPUTS]),
        scale_B,
        tops_BT,
        sums_BT,
        tops_BT if logits_BV is None else logits_BV,
        num_rows,
        width,
        vocabulary,
        KEEPS_LOGITS=logits_BV is not None,
        NUM_TILES=num_tiles,
        TILE=TILE_AGAIN,
        ROWS=tile_rows,
        WORDS=words,
        INPUTS=_INPUTS,
        PRECISION="ieee" if hidden_BD.dtype == torch.float32 else "tf32",
        num_warps=8,
        num_stages=_STAGES,
        **early(hidden_BD.device),
    )
    return tops_BT, sums_BT


@cache
def _num_programs(device: torch.device) -> int:
    """Return one program for each multiprocessor, because its sums fill all registers."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def draw_and_move(
    state: Rows,
    tops_BT: Tensor,
    sums_BT: Tensor,
    vocabulary: int,
    tile: int,
    *,
    logits_BV: Tensor | None = None,
    product: tuple[Tensor, Tensor] | None = None,
    is_cut_B: Tensor | None = None,
) -> None:
    """Draw tokens from the tiles' sums and advance the rows, except those with a cut."""
    num_rows, num_tiles = tops_BT.shape
    hidden_BD, weight_VD = product if product is not None else (tops_BT, tops_BT)
    _draw[(num_rows,)](
        tops_BT if logits_BV is None else logits_BV,
        hidden_BD,
        weight_VD,
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
        state.moves_B if is_cut_B is None else is_cut_B,
        vocabulary,
        hidden_BD.shape[1],
        state.noise_SB.stride(0),
        HAS_CUT=is_cut_B is not None,
        HAS_LOGITS=logits_BV is not None,
        NUM_TILES=num_tiles,
        PADDED_TILES=triton.next_power_of_2(num_tiles),
        TILE=tile,
        INPUTS=_INPUTS_AGAIN,
        num_warps=8,
        **early(tops_BT.device),
    )
