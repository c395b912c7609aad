"""The matrix product of the invariant numerics: x @ weight.T + bias by tiles of one shape.

A program computes `rows` x `outputs` entries and adds up all inputs in one order, `inputs` at a
time, in fp32. Nothing is split over programs, and the tile is the same for one row and for many:
rows that are missing are computed and not stored. So an entry's bits follow from its row, its
column and the number of inputs.

Suffixes: `_M` rows, `_K` inputs, `_O` outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import aligned, launches

# Programs that share columns of the weight run side by side: their rows come from the L2 cache.
_NEIGHBOURS = 8


@dataclass(frozen=True, slots=True)
class _Tile:
    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


_HALF = _Tile(rows=128, outputs=128, inputs=64, warps=8, stages=3)
# Exact fp32 products do not go through the tensor cores: a smaller tile fits the registers.
_SINGLE = _Tile(rows=64, outputs=64, inputs=32, warps=8, stages=2)


def product(
    x_MK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """[M, O]. Not differentiable."""
    assert x_MK.dtype == weight_OK.dtype, (x_MK.dtype, weight_OK.dtype)
    (num_rows, num_inputs), num_outputs = x_MK.shape, weight_OK.shape[0]
    out_MO = x_MK.new_empty((num_rows, num_outputs), dtype=out_dtype)
    is_single = x_MK.dtype == torch.float32
    tile = _SINGLE if is_single else _HALF
    if launches(out_MO):
        grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.outputs),)
        _product[grid](
            aligned(x_MK), aligned(weight_OK), weight_OK if bias_O is None else bias_O, out_MO,
            num_rows, num_outputs, num_inputs,
            HAS_BIAS=bias_O is not None, IS_WHOLE=num_inputs % tile.inputs == 0,
            PRECISION="ieee" if is_single else "tf32", NEIGHBOURS=_NEIGHBOURS,
            ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out_MO


@triton.jit
def _place(
    num_rows, num_outputs, NEIGHBOURS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr
):
    """The program's tile: first row, first output."""
    program = tl.program_id(0)
    high, wide = tl.cdiv(num_rows, ROWS), tl.cdiv(num_outputs, OUTPUTS)
    band = program // (NEIGHBOURS * wide)
    in_band = program % (NEIGHBOURS * wide)
    height = tl.minimum(high - band * NEIGHBOURS, NEIGHBOURS)
    return (band * NEIGHBOURS + in_band % height) * ROWS, in_band // height * OUTPUTS


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, IS_WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    NEIGHBOURS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    first_row, first_output = _place(num_rows, num_outputs, NEIGHBOURS, ROWS, OUTPUTS)
    row, output = first_row + tl.arange(0, ROWS), first_output + tl.arange(0, OUTPUTS)
    at_k = tl.arange(0, INPUTS)
    # Beyond the last one the first is read: what comes of it is not stored.
    x_row = tl.where(row < num_rows, row, 0).to(tl.int64)
    weight_row = tl.where(output < num_outputs, output, 0).to(tl.int64)
    at_x = x_ptr + x_row[:, None] * num_inputs + at_k[None, :]
    at_weight = weight_ptr + weight_row[None, :] * num_inputs + at_k[:, None]
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, num_inputs, INPUTS):
        if IS_WHOLE:
            x, weight = tl.load(at_x), tl.load(at_weight)
        else:
            inside = at_k < num_inputs - first
            x = tl.load(at_x, mask=inside[None, :], other=0.0)
            weight = tl.load(at_weight, mask=inside[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
        at_x += INPUTS
        at_weight += INPUTS
    is_output = output < num_outputs
    if HAS_BIAS:
        bias = tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)
        total += bias[None, :]
    at = out_ptr + row[:, None].to(tl.int64) * num_outputs + output[None, :]
    inside = (row[:, None] < num_rows) & is_output[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=inside)
