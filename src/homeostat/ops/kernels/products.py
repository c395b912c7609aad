"""The matrix product of the invariant numerics: x @ weight.T + bias in tiles.

A program computes `rows` x `outputs` entries and adds up all inputs in one order, in fp32. Nothing
is split over programs, and missing rows are computed but not stored. So the bits of an entry depend
only on its row, its column and the number of inputs.

The shape of a tile is chosen by the numbers of rows and outputs: with few rows reading the weight
is the bottleneck, with many rows multiplying. This does not change the bits: Hopper's tensor cores
take 16 inputs of an entry at a time, in order, whatever tile the entry is in and however many
inputs are loaded at once, and the transposed product (weight @ x.T) has the same bits. Each device
is tested for this once (`_tiles_agree`); if the test fails, only one tile shape is used.

Suffixes: `_M` rows, `_K` inputs, `_O` outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import aligned, launches

# Programs that share columns of the weight run at the same time, so they hit the L2 cache.
_NEIGHBOURS = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of a tile. `is_turned` puts the weight's rows into the tile's rows.

    Tensor cores need 64 rows, which a small batch does not have.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    is_turned: bool = False

    def count(self, num_rows: int, num_outputs: int) -> int:
        """Return the number of programs of a product."""
        return triton.cdiv(num_rows, self.rows) * triton.cdiv(num_outputs, self.outputs)


# The largest first.
_HALF = (
    Tile(rows=128, outputs=128, inputs=64, warps=8, stages=3),
    Tile(rows=64, outputs=64, inputs=128, warps=4, stages=3, is_turned=True),
    Tile(rows=32, outputs=64, inputs=128, warps=4, stages=4, is_turned=True),
)
_FEWEST = Tile(rows=16, outputs=64, inputs=128, warps=4, stages=4, is_turned=True)
# Number of programs that keep a large GPU busy; with fewer, smaller tiles are faster.
_BUSY = 150
# Exact fp32 products do not use the tensor cores; a smaller tile fits into the registers.
_SINGLE = Tile(rows=64, outputs=64, inputs=32, warps=8, stages=2)


def half_tiles() -> tuple[Tile, ...]:
    """Return the tile shapes for bf16 and fp16."""
    return (*_HALF, _FEWEST)


def single_tile() -> Tile:
    """Return the tile shape for fp32."""
    return _SINGLE


def tile_of(num_rows: int, num_outputs: int, dtype: torch.dtype) -> Tile:
    """Return the largest tile whose rows are used and that keeps the device busy."""
    if dtype == torch.float32:
        return _SINGLE
    if num_rows <= _FEWEST.rows:
        return _FEWEST
    fitting = (tile for tile in _HALF if 2 * num_rows > tile.rows)
    busy = (tile for tile in fitting if tile.count(num_rows, num_outputs) >= _BUSY)
    return next(busy, _HALF[-1])


@cache
def _tiles_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether an entry has the same bits in all tile shapes.

    They differ if the shape of a tile determines the order of sums, as in Triton's interpreter.
    """
    if device.type != "cuda":
        return False
    generator = torch.Generator(device).manual_seed(0)
    x_MK, weight_OK = torch.randn(2, 96, 1024, generator=generator, device=device).to(dtype)
    found = [
        product(x_MK, weight_OK, None, out_dtype=torch.float32, tile=tile) for tile in half_tiles()
    ]
    return all(torch.equal(found[0], other) for other in found[1:])


def _chosen_tile(x_MK: Tensor, num_outputs: int) -> Tile:
    if x_MK.dtype == torch.float32 or _tiles_agree(x_MK.device, x_MK.dtype):
        return tile_of(len(x_MK), num_outputs, x_MK.dtype)
    return _HALF[0]


def product(
    x_MK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None,
    *,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """Return [M, O]. Not differentiable. `tile` overrides the choice of the tile shape."""
    assert x_MK.dtype == weight_OK.dtype, (x_MK.dtype, weight_OK.dtype)
    (num_rows, num_inputs), num_outputs = x_MK.shape, weight_OK.shape[0]
    out_MO = x_MK.new_empty((num_rows, num_outputs), dtype=out_dtype)
    if launches(out_MO):
        tile = tile or _chosen_tile(x_MK, num_outputs)
        _product[(tile.count(num_rows, num_outputs),)](
            aligned(x_MK), aligned(weight_OK), weight_OK if bias_O is None else bias_O, out_MO,
            num_rows, num_outputs, num_inputs,
            HAS_BIAS=bias_O is not None, IS_WHOLE=num_inputs % tile.inputs == 0,
            PRECISION="ieee" if x_MK.dtype == torch.float32 else "tf32", NEIGHBOURS=_NEIGHBOURS,
            ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, IS_TURNED=tile.is_turned,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out_MO


@triton.jit
def _place(
    num_rows, num_outputs, NEIGHBOURS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr
):
    """Return the program's tile: first row, first output."""
    program = tl.program_id(0)
    high, wide = tl.cdiv(num_rows, ROWS), tl.cdiv(num_outputs, OUTPUTS)
    band = program // (NEIGHBOURS * wide)
    in_band = program % (NEIGHBOURS * wide)
    height = tl.minimum(high - band * NEIGHBOURS, NEIGHBOURS)
    return (band * NEIGHBOURS + in_band % height) * ROWS, in_band // height * OUTPUTS


@triton.jit
def along(at, IS_DOWN: tl.constexpr):
    """Return a vector as the rows of a tile, or as its columns."""
    return at[:, None] if IS_DOWN else at[None, :]


@triton.jit
def sum_of_tile(
    at_x, at_weight, at_kx, at_kw, num_inputs, IS_WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """Sum the products of a tile over all inputs, INPUTS at a time; the addresses are the first."""
    total = tl.zeros((OUTPUTS, ROWS) if IS_TURNED else (ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, num_inputs, INPUTS):
        if IS_WHOLE:
            x, weight = tl.load(at_x), tl.load(at_weight)
        else:
            x = tl.load(at_x, mask=at_kx < num_inputs - first, other=0.0)
            weight = tl.load(at_weight, mask=at_kw < num_inputs - first, other=0.0)
        if IS_TURNED:
            total = tl.dot(weight, x, total, input_precision=PRECISION)
        else:
            total = tl.dot(x, weight, total, input_precision=PRECISION)
        at_x += INPUTS
        at_weight += INPUTS
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, IS_WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    NEIGHBOURS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    IS_TURNED: tl.constexpr,
):  # fmt: skip
    first_row, first_output = _place(num_rows, num_outputs, NEIGHBOURS, ROWS, OUTPUTS)
    row = along(first_row + tl.arange(0, ROWS), not IS_TURNED)
    output = along(first_output + tl.arange(0, OUTPUTS), IS_TURNED)
    at_kx = along(tl.arange(0, INPUTS), IS_TURNED)
    at_kw = along(tl.arange(0, INPUTS), not IS_TURNED)
    # Beyond the last row read the first one; its result is not stored.
    at_x = x_ptr + tl.where(row < num_rows, row, 0).to(tl.int64) * num_inputs + at_kx
    at_weight = weight_ptr + tl.where(output < num_outputs, output, 0).to(tl.int64) * num_inputs
    at_weight += at_kw
    total = sum_of_tile(
        at_x, at_weight, at_kx, at_kw, num_inputs,
        IS_WHOLE, PRECISION, ROWS, OUTPUTS, INPUTS, IS_TURNED,
    )  # fmt: skip
    is_output = output < num_outputs
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)
    at = out_ptr + row.to(tl.int64) * num_outputs + output
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(row < num_rows) & is_output)
