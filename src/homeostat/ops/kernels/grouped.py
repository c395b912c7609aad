"""Products of the rows of all (token, slot) pairs with the matrices of their experts, in tiles.

A program computes `rows` x `outputs` entries of one expert and adds up all inputs in one order, in
fp32, as ops/kernels/products.py does; what is said there about bits holds here. So the bits of an
entry depend only on its row, its column and its expert: not on which tokens are in the pass. Which
tile belongs to which expert is known on the device only (ops/kernels/pairs.py).

Suffixes: `_S` pairs by expert, `_E` experts, `_K` inputs, `_O` outputs, `_T` tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import aligned, launches
from homeostat.ops.kernels.pairs import tiles_of
from homeostat.ops.kernels.products import Tile, along, single_tile, sum_of_tile
from homeostat.ops.pairs import Pairs, pairs_of

# Each with the mean number of an expert's rows up to which it is the fastest on an H200. Loads are
# uneven: small tiles hold twice the mean, so that few weights are read more than once.
_TILES = (
    (8, Tile(rows=16, outputs=128, inputs=128, warps=4, stages=3, is_turned=True)),
    (16, Tile(rows=32, outputs=128, inputs=64, warps=4, stages=4, is_turned=True)),
    (64, Tile(rows=64, outputs=256, inputs=64, warps=8, stages=3)),
    (math.inf, Tile(rows=128, outputs=256, inputs=64, warps=8, stages=3)),
)


def grouped_tiles() -> tuple[Tile, ...]:
    """Return the tile shapes for bf16 and fp16, the largest last."""
    return tuple(tile for _, tile in _TILES)


@dataclass(frozen=True, slots=True)
class Cut:
    """Pairs cut into tiles of one shape (ops/kernels/pairs.py: tiles_of)."""

    tile: Tile
    tiles_3T: Tensor


def cut_of(pairs: Pairs, *, like: Tensor, tile: Tile | None = None) -> Cut:
    """Cut pairs into tiles; `like` is a tensor that is multiplied. `tile` overrides the choice."""
    tile = tile or _tile_of(pairs, like)
    return Cut(tile, tiles_of(pairs.ends_E, len(pairs.order_S), rows=tile.rows))


def _tile_of(pairs: Pairs, like: Tensor) -> Tile:
    """Return the tile for the mean load of an expert, or the one shape where bits depend on it."""
    if like.dtype == torch.float32:
        return single_tile()
    if not tiles_agree(like.device, like.dtype):
        return grouped_tiles()[-1]
    mean_rows = len(pairs.order_S) / len(pairs.ends_E)
    return next(tile for most, tile in _TILES if mean_rows <= most)


@cache
def tiles_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether an entry has the same bits in all tile shapes (ops/kernels/products.py)."""
    if device.type != "cuda":
        return False
    generator = torch.Generator(device).manual_seed(0)
    x_SK = torch.randn(200, 1024, generator=generator, device=device).to(dtype)
    weight_EOK = torch.randn(2, 300, 1024, generator=generator, device=device).to(dtype)
    pairs = pairs_of((torch.arange(200, device=device) > 70).long()[:, None], 2, like=x_SK)
    cuts = (cut_of(pairs, like=x_SK, tile=tile) for tile in grouped_tiles())
    first, *others = (grouped_product(x_SK, weight_EOK, pairs, cut) for cut in cuts)
    return all(torch.equal(first, other) for other in others)


def grouped_product(
    x: Tensor, weight_EOK: Tensor, pairs: Pairs, cut: Cut, *, num_slots: int = 0
) -> Tensor:
    """Return [S, O]: each row by its expert's matrix. Not differentiable.

    `x` has a row for each place; with `num_slots`, a row for each token.
    """
    assert x.dtype == weight_EOK.dtype, (x.dtype, weight_EOK.dtype)
    num_pairs, (_, num_outputs, num_inputs) = len(pairs.order_S), weight_EOK.shape
    out_SO = x.new_empty(num_pairs, num_outputs)
    if launches(out_SO):
        tile, tiles_3T = cut.tile, cut.tiles_3T
        grid = (triton.cdiv(num_outputs, tile.outputs), tiles_3T.shape[1])
        _grouped[grid](
            aligned(x), aligned(weight_EOK), out_SO, pairs.order_S, tiles_3T,
            num_outputs, num_inputs, SLOTS=num_slots, IS_WHOLE=num_inputs % tile.inputs == 0,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, IS_TURNED=tile.is_turned,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out_SO


@triton.jit
def _rows_of_tile(tiles_ptr, order_ptr, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's expert (-1: none), its places, which of them are its own, rows of x there."""
    tile, num_tiles = tl.program_id(1), tl.num_programs(1)
    expert = tl.load(tiles_ptr + tile)
    place = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, ROWS)
    is_row = place < tl.load(tiles_ptr + 2 * num_tiles + tile)
    # Beyond the expert's last row read the first one of all; its result is not stored.
    row = tl.where(is_row, place, 0)
    if SLOTS > 0:
        row = tl.load(order_ptr + row, mask=is_row, other=0) // SLOTS
    return expert, place, is_row, row


@triton.jit
def _grouped(
    x_ptr, weight_ptr, out_ptr, order_ptr, tiles_ptr, num_outputs, num_inputs,
    SLOTS: tl.constexpr, IS_WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    expert, place, is_row, row = _rows_of_tile(tiles_ptr, order_ptr, SLOTS, ROWS)
    if expert >= 0:
        output = along(tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), IS_TURNED)
        at_kx = along(tl.arange(0, INPUTS), IS_TURNED)
        at_kw = along(tl.arange(0, INPUTS), not IS_TURNED)
        at_x = x_ptr + along(row, not IS_TURNED).to(tl.int64) * num_inputs + at_kx
        is_output = output < num_outputs
        at_weight = tl.where(is_output, output, 0) + expert.to(tl.int64) * num_outputs
        at_weight = weight_ptr + at_weight * num_inputs + at_kw
        total = sum_of_tile(
            at_x, at_weight, at_kx, at_kw, num_inputs,
            IS_WHOLE, PRECISION, ROWS, OUTPUTS, INPUTS, IS_TURNED,
        )  # fmt: skip
        at = out_ptr + along(place, not IS_TURNED).to(tl.int64) * num_outputs + output
        is_own = along(is_row, not IS_TURNED) & is_output
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=is_own)
