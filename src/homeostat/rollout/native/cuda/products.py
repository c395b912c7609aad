"""Linear maps of a batch's rows, one launch each with what comes before and after them.

A program owns a tile of outputs and rows, and where such tiles are few, a share of the inputs; the
last share to arrive sums up all of them. Outputs are the tall side of a product: a tensor core
takes 64 of them, but as few as 8 rows.

    into_heads   q, k and v              three weights side by side, one product
    gated        silu(gate) * up         two weights side by side, one product
    added        x += inputs @ weight.T  in place, and what the next norm needs

A norm costs no launch. `added` gives the rows times the norm's weight, and of each tile of x the
sums of squares; a product is linear, so that the next one divides its sums by the root of the mean
square, row by row.

Adapters cost no launch either: their rows lie before those of the weight (low_rank.py).

Suffixes: `_B` rows, `_D` model dim, `_I` the MLP's inner dim, `_O` outputs, `_K` inputs, `_T` tiles
of outputs.
"""

# Triton compiles its kernels from source: pyright misreads their calls.
# pyright: reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from homeostat.rollout.native.cuda.early import (
    can_start_early,
    early,
    let_next_start,
    wait_for_last,
)
from homeostat.rollout.native.cuda.low_rank import (
    Factors,
    LowRank,
    empty_next,
    leave_low,
    low_of,
    rows_of_b,
)
from homeostat.rollout.native.cuda.shares import sum_of_shares

# Beyond, a library's products are better.
MAX_ROWS = 256
# Outputs of a tile, which is what a tensor core takes.
OUTPUTS = 64
# Tiles that are enough to keep the device busy, of short sums and of long ones; tiles that it can
# hold at once.
_BUSY, _BUSY_LONG, _FULL = 64, 48, 264
# Programs, where tiles are shared out.
_SHARED = 128
_MAX_TILE_ROWS = 128
# Bytes of a row's inputs that are multiplied at a time.
_INPUT_BYTES = 256
# Shared memory of a program for tiles in flight.
_STAGE_BYTES = 200_000


@triton.jit
def _squares(squares_ptr, at_B, is_row, TILES: tl.constexpr, PADDED_TILES: tl.constexpr):
    at_T = tl.arange(0, PADDED_TILES)
    is_in = is_row[:, None] & (at_T < TILES)[None, :]
    return tl.load(squares_ptr + at_B[:, None] * TILES + at_T[None, :], mask=is_in, other=0.0)


@triton.jit
def _rstd(squares, width, eps):
    return 1.0 / tl.sqrt(tl.sum(squares, 1) / width + eps)


@triton.jit
def _into_heads(
    x_desc, weight_desc, squares_ptr, bias_ptr, out_ptr, b_ptr, low_ptr, next_ptr, eps, scale,
    num_rows, num_inputs, num_outputs, second, third,
    TILES: tl.constexpr, PADDED_TILES: tl.constexpr, HAS_BIAS: tl.constexpr,
    AHEAD: tl.constexpr, LOW_WIDTH: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row, place = tl.program_id(0) * ROWS, tl.program_id(1) * OUTPUTS
    output = place - AHEAD
    at_B, at_O = row + tl.arange(0, ROWS), output + tl.arange(0, OUTPUTS)
    is_row, is_output = at_B < num_rows, (at_O >= 0) & (at_O < num_outputs)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + at_O, mask=is_output, other=0.0).to(tl.float32)
    if RANK > 0:
        b = rows_of_b(b_ptr, at_O, is_output, RANK, PADDED_RANK)
    wait_for_last(EARLY)
    let_next_start(EARLY)
    empty_next(next_ptr, place, at_B, is_row, AHEAD, LOW_WIDTH, OUTPUTS)
    # Loaded early, so that what the end needs is in flight while the sums are computed.
    if TILES > 0:
        squares = _squares(squares_ptr, at_B, is_row, TILES, PADDED_TILES)
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, num_inputs, INPUTS):
        weight, x = weight_desc.load([place, start]), x_desc.load([row, start])
        sums = tl.dot(weight, tl.trans(x), sums, input_precision=PRECISION)
    if TILES > 0:
        sums *= _rstd(squares, num_inputs, eps)[None, :]
    if RANK > 0:
        if output < 0:
            rounded = tl.trans(sums).to(out_ptr.dtype.element_ty)
            leave_low(rounded, low_ptr, place, at_B, is_row, LOW_WIDTH, OUTPUTS)
        else:
            map_O = (at_O >= second).to(tl.int32) + (at_O >= third).to(tl.int32)
            # A tile has outputs of one map, most often.
            for number in range(tl.min(map_O, 0), tl.max(map_O, 0) + 1):
                low = low_of(low_ptr, number, at_B, is_row, LOW_WIDTH, RANK, PADDED_RANK).to(
                    b.dtype
                )
                own = tl.where((map_O == number)[:, None], b, 0.0).to(b.dtype)
                sums += scale * tl.dot(own, low, input_precision=PRECISION)
    if HAS_BIAS:
        sums += bias[:, None]
    at = out_ptr + at_B[:, None] * num_outputs + at_O[None, :]
    out = tl.trans(sums).to(out_ptr.dtype.element_ty)
    tl.store(at, out, mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _gated(
    x_desc, weight_desc, squares_ptr, out_ptr, b_ptr, low_ptr, next_ptr, eps, scale,
    num_rows, num_inputs, num_outputs,
    TILES: tl.constexpr, PADDED_TILES: tl.constexpr,
    AHEAD: tl.constexpr, LOW_WIDTH: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row, place = tl.program_id(0) * ROWS, tl.program_id(1) * OUTPUTS
    output = place - AHEAD
    at_B, at_O = row + tl.arange(0, ROWS), output + tl.arange(0, OUTPUTS)
    is_row, is_output = at_B < num_rows, (at_O >= 0) & (at_O < num_outputs)
    if RANK > 0:
        gate_b = rows_of_b(b_ptr, at_O, is_output, RANK, PADDED_RANK)
        up_b = rows_of_b(b_ptr + num_outputs * RANK, at_O, is_output, RANK, PADDED_RANK)
    wait_for_last(EARLY)
    empty_next(next_ptr, place, at_B, is_row, AHEAD, LOW_WIDTH, OUTPUTS)
    squares = _squares(squares_ptr, at_B, is_row, TILES, PADDED_TILES)
    gate = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, num_inputs, INPUTS):
        x = x_desc.load([row, start])
        # Where these are A's rows, those of `up` are multiplied in vain.
        gate_weight = weight_desc.load([place, start])
        up_weight = weight_desc.load([num_outputs + place, start])
        gate = tl.dot(gate_weight, tl.trans(x), gate, input_precision=PRECISION)
        up = tl.dot(up_weight, tl.trans(x), up, input_precision=PRECISION)
    let_next_start(EARLY)
    rstd = _rstd(squares, num_inputs, eps)[None, :]
    gate *= rstd
    up *= rstd
    if RANK > 0:
        if output < 0:
            rounded = tl.trans(gate).to(out_ptr.dtype.element_ty)
            leave_low(rounded, low_ptr, place, at_B, is_row, LOW_WIDTH, OUTPUTS)
        else:
            low = low_of(low_ptr, 0, at_B, is_row, LOW_WIDTH, RANK, PADDED_RANK).to(gate_b.dtype)
            gate += scale * tl.dot(gate_b, low, input_precision=PRECISION)
            low = low_of(low_ptr, 1, at_B, is_row, LOW_WIDTH, RANK, PADDED_RANK).to(up_b.dtype)
            up += scale * tl.dot(up_b, low, input_precision=PRECISION)
    element = out_ptr.dtype.element_ty
    gate = gate.to(element).to(tl.float32)
    up = up.to(element).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    at = out_ptr + at_B[:, None] * num_outputs + at_O[None, :]
    is_in = is_row[:, None] & is_output[None, :]
    tl.store(at, tl.trans((activated * up).to(element)), mask=is_in)


@triton.jit
def _added(
    inputs_desc, weight_desc, x_ptr, norm_ptr, scaled_ptr, squares_ptr, sums_ptr, arrived_ptr,
    b_ptr, low_ptr, next_ptr, scale, num_rows, num_inputs, num_outputs,
    AHEAD: tl.constexpr, LOW_WIDTH: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr,
    SHARES: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, place, share = tl.program_id(0) * ROWS, tl.program_id(1) * OUTPUTS, tl.program_id(2)
    output = place - AHEAD
    per_share = tl.cdiv(tl.cdiv(num_inputs, INPUTS), SHARES) * INPUTS
    first = share * per_share
    at_B, at_O = row + tl.arange(0, ROWS), output + tl.arange(0, OUTPUTS)
    is_row, is_output = at_B < num_rows, (at_O >= 0) & (at_O < num_outputs)
    is_in = is_row[:, None] & is_output[None, :]
    at = at_B[:, None] * num_outputs + at_O[None, :]
    if RANK > 0:
        b = rows_of_b(b_ptr, at_O, is_output, RANK, PADDED_RANK)
    norm = tl.load(norm_ptr + at_O, mask=is_output, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    if share == 0:
        empty_next(next_ptr, place, at_B, is_row, AHEAD, LOW_WIDTH, OUTPUTS)
    x = tl.load(x_ptr + at, mask=is_in, other=0.0)
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(first, tl.minimum(first + per_share, num_inputs), INPUTS):
        weight, inputs = weight_desc.load([place, start]), inputs_desc.load([row, start])
        sums = tl.dot(weight, tl.trans(inputs), sums, input_precision=PRECISION)
    let_next_start(EARLY)
    is_whole = True
    if SHARES > 1:
        is_whole, sums = sum_of_shares(sums, sums_ptr, arrived_ptr, share, OUTPUTS, ROWS, SHARES)
    if is_whole:
        if RANK > 0:
            if output < 0:
                low = tl.trans(sums).to(x_ptr.dtype.element_ty)
                leave_low(low, low_ptr, place, at_B, is_row, LOW_WIDTH, OUTPUTS)
            else:
                low = low_of(low_ptr, 0, at_B, is_row, LOW_WIDTH, RANK, PADDED_RANK).to(b.dtype)
                sums += scale * tl.dot(b, low, input_precision=PRECISION)
        element = x_ptr.dtype.element_ty
        added = tl.trans(sums).to(element).to(tl.float32)
        rounded = (x.to(tl.float32) + added).to(element)
        tl.store(x_ptr + at, rounded, mask=is_in)
        whole = rounded.to(tl.float32)
        tl.store(scaled_ptr + at, (whole * norm[None, :]).to(element), mask=is_in)
        squares = tl.sum(tl.where(is_in, whole * whole, 0.0), 1)
        low_tiles: tl.constexpr = AHEAD // OUTPUTS
        at_tile = at_B * (tl.num_programs(1) - low_tiles) + tl.program_id(1) - low_tiles
        if output >= 0:
            tl.store(squares_ptr + at_tile, squares, mask=is_row)


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rows times the weight of a norm, and the sums of squares of the rows themselves; none where
    the rows are normed already."""

    rows_BD: Tensor
    squares_BT: Tensor | None = None

    def options(self) -> dict[str, int]:
        tiles = 0 if self.squares_BT is None else self.squares_BT.shape[1]
        return {"TILES": tiles, "PADDED_TILES": triton.next_power_of_2(max(tiles, 1))}


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiling of a product.

    `inputs` are multiplied at a time; `shares` parts of the inputs are computed in parallel.
    """

    rows: int
    inputs: int
    stages: int
    shares: int = 1

    def descriptors(self, x_BK: Tensor, weight_OK: Tensor) -> tuple[TensorDescriptor, ...]:
        return (
            TensorDescriptor.from_tensor(x_BK, [self.rows, self.inputs]),
            TensorDescriptor.from_tensor(weight_OK, [OUTPUTS, self.inputs]),
        )

    def grid(self, num_rows: int, num_outputs: int) -> tuple[int, int, int]:
        return triton.cdiv(num_rows, self.rows), triton.cdiv(num_outputs, OUTPUTS), self.shares

    def options(self, x_BK: Tensor) -> dict[str, Any]:
        return {
            "OUTPUTS": OUTPUTS,
            "ROWS": self.rows,
            "INPUTS": self.inputs,
            "PRECISION": "ieee" if x_BK.dtype == torch.float32 else "tf32",
            "num_stages": self.stages,
            **early(x_BK.device),
        }


def tiles_for(num_rows: int, weight_OK: Tensor) -> Tiles:
    """As many rows as leave enough tiles to keep the device busy; of long sums, shares."""
    num_outputs, num_inputs = weight_OK.shape
    is_long = num_inputs >= 2048
    rows, wanted = (_MAX_TILE_ROWS, _BUSY_LONG) if is_long else (64, _BUSY)
    tall = triton.cdiv(num_outputs, OUTPUTS)
    while rows > 16 and (rows >= 2 * num_rows or tall * triton.cdiv(num_rows, rows) < wanted):
        rows //= 2
    tiles = tall * triton.cdiv(num_rows, rows)
    shares = min(max(_SHARED // tiles, 1), 4) if is_long else 1
    stages = min(_STAGE_BYTES // (_INPUT_BYTES * (OUTPUTS + rows)), 6)
    return Tiles(rows, _INPUT_BYTES // weight_OK.itemsize, stages, shares)


def tiles_for_gated(num_rows: int, weight_OK: Tensor) -> Tiles:
    """Tiles are many: they hold as many rows as there are, and two fit where one is computed."""
    rows = _gated_rows(num_rows)
    num_bytes = _INPUT_BYTES // 2 if rows == _MAX_TILE_ROWS else _INPUT_BYTES
    return Tiles(rows, num_bytes // weight_OK.itemsize, stages=3)


def _gated_rows(num_rows: int) -> int:
    return min(max(triton.next_power_of_2(num_rows), 16), _MAX_TILE_ROWS)


def can_multiply(weight_OK: Tensor | None) -> bool:
    """On Hopper, in 16 bits; tiles are copied by rows that begin at multiples of 16 bytes."""
    if weight_OK is None or weight_OK.stride(0) * weight_OK.itemsize % 16:
        return False
    return not weight_OK.is_cuda or (weight_OK.itemsize == 2 and can_start_early(weight_OK.device))


def are_better(num_rows: int, num_gates: int) -> bool:
    """Than a library's products: for rows that are not many, while all tiles of the widest product
    can be computed at once."""
    grid = Tiles(_gated_rows(num_rows), 1, 1).grid(num_rows, num_gates)
    return num_rows <= MAX_ROWS and math.prod(grid) <= _FULL


class Scratch:
    """Room for the sums that shares of the inputs leave, one product after the other."""

    def __init__(self, device: torch.device) -> None:
        size = _SHARED * OUTPUTS * _MAX_TILE_ROWS
        self.sums = torch.empty(size, device=device, dtype=torch.float32)
        self.arrived = torch.zeros(_SHARED, device=device, dtype=torch.int32)


def into_heads(
    x: Scaled,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    *,
    eps: float,
    adapter: LowRank | None = None,
) -> Tensor:
    """[B, O]: q, k and v of the normed rows, one after the other."""
    factors = Factors.of(weight_OD, adapter)
    (num_rows, width), num_outputs = x.rows_BD.shape, factors.num_outputs
    tiles = tiles_for(num_rows, factors.weight_PK)
    out_BO = x.rows_BD.new_empty(num_rows, num_outputs)
    _into_heads[tiles.grid(num_rows, len(factors.weight_PK))](
        *tiles.descriptors(x.rows_BD, factors.weight_PK),
        x.squares_BT if x.squares_BT is not None else out_BO,
        bias_O if bias_O is not None else out_BO,
        out_BO,
        *factors.tensors(),
        eps,
        factors.scale,
        num_rows,
        width,
        num_outputs,
        *((num_outputs, num_outputs) if adapter is None else adapter.starts),
        HAS_BIAS=bias_O is not None,
        **factors.options(),
        **x.options(),
        **tiles.options(out_BO),
    )
    return out_BO


def gated(x: Scaled, weight_OD: Tensor, *, eps: float, adapter: LowRank | None = None) -> Tensor:
    """[B, I]. `weight_OD`: gate's rows, then up's."""
    factors = Factors.of(weight_OD, adapter)
    (num_rows, width), num_outputs = x.rows_BD.shape, factors.num_outputs // 2
    tiles = tiles_for_gated(num_rows, factors.weight_PK)
    out_BI = x.rows_BD.new_empty(num_rows, num_outputs)
    _gated[tiles.grid(num_rows, len(factors.weight_PK) - num_outputs)](
        *tiles.descriptors(x.rows_BD, factors.weight_PK),
        x.squares_BT,
        out_BI,
        *factors.tensors(),
        eps,
        factors.scale,
        num_rows,
        width,
        num_outputs,
        **factors.options(),
        **x.options(),
        **tiles.options(out_BI),
    )
    return out_BI


def added(
    x_BO: Tensor,
    inputs_BK: Tensor,
    weight_OK: Tensor,
    norm_O: Tensor,
    scratch: Scratch,
    *,
    adapter: LowRank | None = None,
) -> Scaled:
    """Compute x += inputs @ weight.T in place; return the input of a product after the norm."""
    factors = Factors.of(weight_OK, adapter)
    (num_rows, num_outputs), num_inputs = x_BO.shape, inputs_BK.shape[1]
    tiles = tiles_for(num_rows, factors.weight_PK)
    grid = tiles.grid(num_rows, len(factors.weight_PK))
    num_tiles = triton.cdiv(num_outputs, OUTPUTS)
    scaled_BO = torch.empty_like(x_BO)
    squares_BT = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=x_BO.device)
    _added[grid](
        *tiles.descriptors(inputs_BK, factors.weight_PK),
        x_BO,
        norm_O,
        scaled_BO,
        squares_BT,
        scratch.sums,
        scratch.arrived,
        *factors.tensors(),
        factors.scale,
        num_rows,
        num_inputs,
        num_outputs,
        **factors.options(),
        SHARES=tiles.shares,
        **tiles.options(x_BO),
    )
    return Scaled(scaled_BO, squares_BT)
