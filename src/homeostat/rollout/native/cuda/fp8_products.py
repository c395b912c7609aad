"""Linear maps of a batch's rows in e4m3: both sides are cast, and tensor cores multiply them.

Tiles are those of products.py. The tensor cores sum products over one block of inputs; the sums of
blocks are multiplied by the scales of both sides and added in fp32. Tensor cores do not sum over
more, because Hopper accumulates e4m3 products with too few digits.

    product   rows @ weight.T + bias
    gated     silu(gate) * up, already cast for the next product if a tile holds whole blocks

Suffixes: `_B` rows, `_I` the MLP's inner dim, `_O` outputs, `_K` inputs, `_G` blocks of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from homeostat.ops.kernels.e4m3 import BLOCK, scales_of, to_e4m3
from homeostat.precision.operands import Operand, TensorCores
from homeostat.precision.recipe import Fp8Recipe
from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.fp8_rows import Fp8Rows, empty_rows
from homeostat.rollout.native.cuda.products import Scratch
from homeostat.rollout.native.cuda.rows import gate
from homeostat.rollout.native.cuda.shares import sum_of_shares
from homeostat.rollout.native.fp8_weights import Fp8Weight

# The number of programs if the inputs of tiles are shared out.
_SHARED = 128
# Rows and weights beyond which a library's product is faster.
_FEW_ROWS, _LARGE = 64, 2**24
_MAX_TILE_ROWS = 128
# Shared memory of a program for tiles in flight.
_STAGE_BYTES = 180_000
_ELEMENTS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@triton.jit
def _scaled(sums, w_scales_ptr, x_scales_ptr, at_O, at_B, is_output, is_row):
    """Multiply products [outputs, rows] by the scales of both sides."""
    w_scales = tl.load(w_scales_ptr + at_O, mask=is_output, other=0.0)
    x_scales = tl.load(x_scales_ptr + at_B, mask=is_row, other=0.0)
    return sums * w_scales[:, None] * x_scales[None, :]


@triton.jit
def _block_product(x_desc, weight_desc, row, output, block):
    weight, x = weight_desc.load([output, block * BLOCK]), x_desc.load([row, block * BLOCK])
    return tl.dot(weight, tl.trans(x), out_dtype=tl.float32)


@triton.jit
def _product(
    x_desc, weight_desc, x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, sums_ptr, arrived_ptr,
    pitch, num_rows, num_inputs, num_outputs, HAS_BIAS: tl.constexpr, BLOCKWISE: tl.constexpr,
    SHARES: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, output, share = tl.program_id(0) * ROWS, tl.program_id(1) * OUTPUTS, tl.program_id(2)
    at_B, at_O = row + tl.arange(0, ROWS), output + tl.arange(0, OUTPUTS)
    is_row, is_output = at_B < num_rows, at_O < num_outputs
    num_blocks = tl.cdiv(num_inputs, BLOCK)
    per_share = tl.cdiv(num_blocks, SHARES)
    first = share * per_share
    last = tl.minimum(first + per_share, num_blocks)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + at_O, mask=is_output, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    let_next_start(EARLY)
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for block in range(first, last):
        found = _block_product(x_desc, weight_desc, row, output, block)
        if BLOCKWISE:
            # All outputs of a tile lie in one square.
            w_scale = tl.load(w_scales_ptr + output // BLOCK * pitch + block)
            x_scales = tl.load(x_scales_ptr + block * num_rows + at_B, mask=is_row, other=0.0)
            found = found * (x_scales * w_scale)[None, :]
        sums += found
    is_whole = True
    if SHARES > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        is_whole, sums = sum_of_shares(
            sums, sums_ptr, arrived_ptr, tile, share, OUTPUTS, ROWS, SHARES
        )
    if is_whole:
        if not BLOCKWISE:
            sums = _scaled(sums, w_scales_ptr, x_scales_ptr, at_O, at_B, is_output, is_row)
        if HAS_BIAS:
            sums += bias[:, None]
        at = out_ptr + at_B[:, None] * num_outputs + at_O[None, :]
        out = tl.trans(sums).to(out_ptr.dtype.element_ty)
        tl.store(at, out, mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _gated(
    x_desc, weight_desc, x_scales_ptr, w_scales_ptr, out_ptr, out_scales_ptr, pitch, num_rows,
    num_inputs, num_outputs, ELEMENT: tl.constexpr, IS_CAST: tl.constexpr, BLOCKWISE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, output = tl.program_id(0) * ROWS, tl.program_id(1) * OUTPUTS
    at_B, at_O = row + tl.arange(0, ROWS), output + tl.arange(0, OUTPUTS)
    is_row, is_output = at_B < num_rows, at_O < num_outputs
    wait_for_last(EARLY)
    gate = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for block in range(0, tl.cdiv(num_inputs, BLOCK)):
        x = x_desc.load([row, block * BLOCK])
        gate_weight = weight_desc.load([output, block * BLOCK])
        up_weight = weight_desc.load([num_outputs + output, block * BLOCK])
        gate_found = tl.dot(gate_weight, tl.trans(x), out_dtype=tl.float32)
        up_found = tl.dot(up_weight, tl.trans(x), out_dtype=tl.float32)
        if BLOCKWISE:
            x_scales = tl.load(x_scales_ptr + block * num_rows + at_B, mask=is_row, other=0.0)
            gate_scale = tl.load(w_scales_ptr + output // BLOCK * pitch + block)
            up_scale = tl.load(w_scales_ptr + (num_outputs + output) // BLOCK * pitch + block)
            gate_found = gate_found * (x_scales * gate_scale)[None, :]
            up_found = up_found * (x_scales * up_scale)[None, :]
        gate += gate_found
        up += up_found
    let_next_start(EARLY)
    if not BLOCKWISE:
        gate = _scaled(gate, w_scales_ptr, x_scales_ptr, at_O, at_B, is_output, is_row)
        up_scales_ptr = w_scales_ptr + num_outputs
        up = _scaled(up, up_scales_ptr, x_scales_ptr, at_O, at_B, is_output, is_row)
    # Rounded where the modules round.
    gate, up = gate.to(ELEMENT).to(tl.float32), up.to(ELEMENT).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(ELEMENT).to(tl.float32)
    out = (activated * up).to(ELEMENT)
    is_in = is_row[:, None] & is_output[None, :]
    at = out_ptr + at_B[:, None] * num_outputs + at_O[None, :]
    if IS_CAST:
        # A tile's outputs are one block of the next product's inputs.
        found = tl.where(is_output[:, None], out.to(tl.float32), 0.0)
        scales, inverses = scales_of(tl.max(tl.abs(found), 0), POWER_OF_TWO)
        cast = to_e4m3(found * inverses[None, :])
        tl.store(out_scales_ptr + tl.program_id(1) * num_rows + at_B, scales, mask=is_row)
        tl.store(at, tl.trans(cast), mask=is_in)
    else:
        tl.store(at, tl.trans(out), mask=is_in)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiling of a product of e4m3 numbers: one block of inputs at a time."""

    rows: int
    outputs: int = 64
    shares: int = 1
    sides: int = 1
    warps: int = 4

    @property
    def stages(self) -> int:
        one = BLOCK.value * (self.sides * self.outputs + self.rows)
        return min(_STAGE_BYTES // one, 6)

    def grid(self, num_rows: int, num_outputs: int) -> tuple[int, int, int]:
        return triton.cdiv(num_rows, self.rows), triton.cdiv(num_outputs, self.outputs), self.shares

    def descriptors(self, x: Fp8Rows, weight: Fp8Weight) -> tuple[TensorDescriptor, ...]:
        return (
            TensorDescriptor.from_tensor(x.values_BK, [self.rows, BLOCK.value]),
            TensorDescriptor.from_tensor(weight.values_OK, [self.outputs, BLOCK.value]),
        )

    def options(self, weight: Fp8Weight) -> dict[str, Any]:
        return {
            "OUTPUTS": self.outputs,
            "ROWS": self.rows,
            "BLOCKWISE": weight.scaling.is_blockwise,
            "num_stages": self.stages,
            "num_warps": self.warps,
            **early(weight.values_OK.device),
        }


def tiles_for(num_rows: int, weight: Fp8Weight) -> Tiles:
    """Return the tiles of a product.

    For few rows: as few tiles as possible, whose inputs are shared out over programs. For many
    rows: enough tiles to keep the device busy.
    """
    num_outputs, num_inputs = weight.values_OK.shape
    rows = _tile_rows(num_rows)
    if num_rows > _FEW_ROWS:
        rows = 64 if num_inputs < 4096 else rows
        outputs = 64
    else:
        outputs = 128 if num_outputs >= 4096 else 64
    tiles = triton.cdiv(num_outputs, outputs) * triton.cdiv(num_rows, rows)
    return Tiles(rows, outputs, shares=min(max(_SHARED // tiles, 1), 4))


def tiles_for_gated(num_rows: int) -> Tiles:
    """Return the tiles of a gated product. There are many, so each holds all rows."""
    rows = min(_tile_rows(num_rows), 64)
    return Tiles(rows, outputs=BLOCK.value, sides=2, warps=8 if rows > 32 else 4)


def is_better(num_rows: int, weight: Fp8Weight) -> bool:
    """Return whether our kernel is faster than a library's product.

    The library is faster for many rows with a large weight.
    """
    is_small = num_rows <= _FEW_ROWS or weight.values_OK.numel() < _LARGE
    return is_small or not weight.values_OK.is_cuda


def _tile_rows(num_rows: int) -> int:
    return min(max(triton.next_power_of_2(num_rows), 16), _MAX_TILE_ROWS)


def product(
    x: Fp8Rows,
    weight: Fp8Weight,
    bias_O: Tensor | None,
    scratch: Scratch,
    *,
    dtype: torch.dtype,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return rows @ weight.T + bias, [B, O], rounded to `dtype`."""
    (num_rows, num_inputs), num_outputs = x.values_BK.shape, weight.num_outputs
    if tiles is None and not is_better(num_rows, weight):
        out_BO = _by_library(x, weight).to(dtype)
        return out_BO if bias_O is None else out_BO + bias_O
    tiles = tiles or tiles_for(num_rows, weight)
    out_BO = torch.empty(num_rows, num_outputs, dtype=dtype, device=x.values_BK.device)
    _product[tiles.grid(num_rows, num_outputs)](
        *tiles.descriptors(x, weight),
        x.scales_GB,
        weight.scales,
        out_BO if bias_O is None else bias_O,
        out_BO,
        scratch.sums,
        scratch.arrived,
        weight.pitch,
        num_rows,
        num_inputs,
        num_outputs,
        HAS_BIAS=bias_O is not None,
        SHARES=tiles.shares,
        **tiles.options(weight),
    )
    return out_BO


def gated(
    x: Fp8Rows, weight: Fp8Weight, *, dtype: torch.dtype, tiles: Tiles | None = None
) -> Fp8Rows | Tensor:
    """Return silu(gate) * up, [B, I]; with blockwise scales it is already cast.

    `weight` holds the rows of gate, then those of up. `dtype` is what the modules would round to.
    """
    (num_rows, num_inputs), num_outputs = x.values_BK.shape, weight.num_outputs // 2
    if tiles is None and not is_better(num_rows, weight):
        return gate(*_by_library(x, weight).to(dtype).split(num_outputs, dim=1))
    tiles = tiles or tiles_for_gated(num_rows)
    device = x.values_BK.device
    is_cast = weight.scaling.is_blockwise and tiles.outputs == BLOCK.value
    if is_cast:
        out = empty_rows(num_rows, num_outputs, weight.scaling, device)
        places = out.values_BK, out.scales_GB
    else:
        out = torch.empty(num_rows, num_outputs, dtype=dtype, device=device)
        places = out, out
    _gated[tiles.grid(num_rows, num_outputs)](
        *tiles.descriptors(x, weight),
        x.scales_GB,
        weight.scales,
        *places,
        weight.pitch,
        num_rows,
        num_inputs,
        num_outputs,
        ELEMENT=_ELEMENTS[dtype],
        IS_CAST=is_cast,
        POWER_OF_TWO=weight.scaling.has_power_of_two_scales,
        **tiles.options(weight),
    )
    return out


def _by_library(x: Fp8Rows, weight: Fp8Weight) -> Tensor:
    """Return bf16 [B, O], computed as the trainer's own products are."""
    is_blockwise = weight.scaling.is_blockwise
    rows = Operand(x.values_BK, x.scales_GB if is_blockwise else x.scales_GB.t())
    scales = weight.scales if is_blockwise else weight.scales.view(-1, 1)
    copies = Operand(weight.values_OK, scales, is_blockwise)
    recipe = Fp8Recipe(scaling="blockwise" if is_blockwise else "rowwise")
    sizes = len(x.values_BK), weight.num_outputs
    return TensorCores().product(rows, copies, recipe, sizes=sizes, fast=True)
