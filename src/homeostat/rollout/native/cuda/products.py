"""Linear maps of a batch's rows: one launch each, which includes the norm before and the sum or
gating after a map.

A program owns a tile of outputs and rows. If there are few such tiles, several programs share the
inputs of one, and the last to finish adds up their results. Outputs are the first dimension of a
tile, because a tensor core takes 64 of these, but as few as 8 rows.

    into_heads   q, k and v              three weights side by side, one product
    gated        silu(gate) * up         two weights side by side, one product
    added        x += inputs @ weight.T  in place, and what the next norm needs

A norm costs no launch. `added` returns the rows times the norm's weight, and the sums of squares of
each tile of x. Since a product is linear, the next one can divide its sums by the root of the mean
square, row by row.

Adapters cost no launch either: their rows lie before those of the weight (low_rank.py).

Suffixes: `_B` rows, `_D` model dim, `_I` the MLP's inner dim, `_O` outputs, `_K` inputs, `_T` tiles
of outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda.early import let_next_start, wait_for_last
from homeostat.rollout.native.cuda.low_rank import (
    Factors,
    LowRank,
    leave_part,
    low_of,
    rows_of_b,
)
from homeostat.rollout.native.cuda.shares import sum_of_shares
from homeostat.rollout.native.cuda.tiles import (
    MAX_ROWS,
    OUTPUTS,
    Scratch,
    are_better,
    can_multiply,
    tiles_for,
    tiles_for_gated,
)

__all__ = (
    "MAX_ROWS",
    "OUTPUTS",
    "Scaled",
    "Scratch",
    "added",
    "are_better",
    "can_multiply",
    "gated",
    "into_heads",
    "tiles_for",
)


@triton.jit
def _squares(squares_ptr, at_B, is_row, TILES: tl.constexpr, PADDED_TILES: tl.constexpr):
    at_T = tl.arange(0, PADDED_TILES)
    is_in = is_row[:, None] & (at_T < TILES)[None, :]
    return tl.load(squares_ptr + at_B[:, None] * TILES + at_T[None, :], mask=is_in, other=0.0)


@triton.jit
def _rstd(squares, width, eps):
    return 1.0 / tl.sqrt(tl.sum(squares, 1) / width + eps)


@triton.jit
def _place(AHEAD: tl.constexpr, PARTS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Return the first row of this program's tile in A and W, and for A the part of A x."""
    lows: tl.constexpr = AHEAD // OUTPUTS
    tile, part = tl.program_id(1), 0
    if AHEAD > 0:
        if tile < lows * PARTS:
            tile, part = tile % lows, tile // lows
        else:
            tile -= lows * (PARTS - 1)
    return tile * OUTPUTS, part


@triton.jit
def _into_heads(
    x_desc, weight_desc, squares_ptr, bias_ptr, out_ptr, b_ptr, low_ptr, next_ptr, eps, scale,
    num_rows, num_inputs, num_outputs, second, third,
    TILES: tl.constexpr, PADDED_TILES: tl.constexpr, HAS_BIAS: tl.constexpr,
    AHEAD: tl.constexpr, LOW_WIDTH: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS
    place, part = _place(AHEAD, PARTS, OUTPUTS)
    output = place - AHEAD
    at_B, at_O = row + tl.arange(0, ROWS), output + tl.arange(0, OUTPUTS)
    is_row, is_output = at_B < num_rows, (at_O >= 0) & (at_O < num_outputs)
    element = out_ptr.dtype.element_ty
    if HAS_BIAS:
        bias = tl.load(bias_ptr + at_O, mask=is_output, other=0.0).to(tl.float32)
    if RANK > 0:
        b = rows_of_b(b_ptr, at_O, is_output, 0, RANK, COLUMNS, PADDED_PARTS)
    wait_for_last(EARLY)
    let_next_start(EARLY)
    # Load early what the end needs, so that it arrives while the sums are computed.
    if TILES > 0:
        squares = _squares(squares_ptr, at_B, is_row, TILES, PADDED_TILES)
    is_low = tl.program_id(1) < AHEAD // OUTPUTS * PARTS if AHEAD > 0 else False
    if is_low:
        rstd = tl.full((ROWS,), 1.0, tl.float32)
        if TILES > 0:
            rstd = _rstd(squares, num_inputs, eps)
        leave_part(
            x_desc, weight_desc, rstd, low_ptr, next_ptr,
            num_inputs, row, place, part, at_B, is_row, LOW_WIDTH, PART, PARTS, OUTPUTS, ROWS,
            INPUTS, PRECISION, element,
        )  # fmt: skip
    else:
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for start in range(0, num_inputs, INPUTS):
            weight, x = weight_desc.load([place, start]), x_desc.load([row, start])
            sums = tl.dot(weight, tl.trans(x), sums, input_precision=PRECISION)
        if TILES > 0:
            sums *= _rstd(squares, num_inputs, eps)[None, :]
        if RANK > 0:
            map_O = (at_O >= second).to(tl.int32) + (at_O >= third).to(tl.int32)
            last = tl.minimum(output + OUTPUTS, num_outputs) - 1
            first_map = (output >= second).to(tl.int32) + (output >= third).to(tl.int32)
            last_map = (last >= second).to(tl.int32) + (last >= third).to(tl.int32)
            # Most tiles have outputs of a single map.
            for number in range(first_map, last_map + 1):
                low = low_of(
                    low_ptr, number * RANK, at_B, is_row, RANK, COLUMNS, LOW_WIDTH, PART, PARTS,
                    PADDED_PARTS, element,
                )  # fmt: skip
                own = tl.where((map_O == number)[:, None], b, 0.0).to(b.dtype)
                sums += scale * tl.dot(own, low, input_precision=PRECISION)
        if HAS_BIAS:
            sums += bias[:, None]
        at = out_ptr + at_B[:, None] * num_outputs + at_O[None, :]
        tl.store(at, tl.trans(sums).to(element), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _gated(
    x_desc, weight_desc, squares_ptr, out_ptr, b_ptr, low_ptr, next_ptr, eps, scale,
    num_rows, num_inputs, num_outputs,
    TILES: tl.constexpr, PADDED_TILES: tl.constexpr,
    AHEAD: tl.constexpr, LOW_WIDTH: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS
    place, part = _place(AHEAD, PARTS, OUTPUTS)
    output = place - AHEAD
    at_B, at_O = row + tl.arange(0, ROWS), output + tl.arange(0, OUTPUTS)
    is_row, is_output = at_B < num_rows, (at_O >= 0) & (at_O < num_outputs)
    element = out_ptr.dtype.element_ty
    if RANK > 0:
        gate_b = rows_of_b(b_ptr, at_O, is_output, 0, RANK, COLUMNS, PADDED_PARTS)
        up_ptr = b_ptr + num_outputs * RANK
        up_b = rows_of_b(up_ptr, at_O, is_output, RANK, RANK, COLUMNS, PADDED_PARTS)
    wait_for_last(EARLY)
    squares = _squares(squares_ptr, at_B, is_row, TILES, PADDED_TILES)
    is_low = tl.program_id(1) < AHEAD // OUTPUTS * PARTS if AHEAD > 0 else False
    if is_low:
        let_next_start(EARLY)
        leave_part(
            x_desc, weight_desc, _rstd(squares, num_inputs, eps), low_ptr, next_ptr,
            num_inputs, row, place, part, at_B, is_row, LOW_WIDTH, PART, PARTS, OUTPUTS, ROWS,
            INPUTS, PRECISION, element,
        )  # fmt: skip
    else:
        gate = tl.zeros((OUTPUTS, ROWS), tl.float32)
        up = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for start in range(0, num_inputs, INPUTS):
            x = x_desc.load([row, start])
            gate_weight = weight_desc.load([place, start])
            up_weight = weight_desc.load([num_outputs + place, start])
            gate = tl.dot(gate_weight, tl.trans(x), gate, input_precision=PRECISION)
            up = tl.dot(up_weight, tl.trans(x), up, input_precision=PRECISION)
        let_next_start(EARLY)
        rstd = _rstd(squares, num_inputs, eps)[None, :]
        gate *= rstd
        up *= rstd
        if RANK > 0:
            low = low_of(
                low_ptr, 0, at_B, is_row, 2 * RANK, COLUMNS, LOW_WIDTH, PART, PARTS, PADDED_PARTS,
                element,
            )  # fmt: skip
            gate += scale * tl.dot(gate_b, low, input_precision=PRECISION)
            up += scale * tl.dot(up_b, low, input_precision=PRECISION)
        gate = gate.to(element).to(tl.float32)
        up = up.to(element).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
        at = out_ptr + at_B[:, None] * num_outputs + at_O[None, :]
        is_in = is_row[:, None] & is_output[None, :]
        tl.store(at, tl.trans((activated * up).to(element)), mask=is_in)


@triton.jit
def _store_sum(
    sums, x, norm, x_ptr, scaled_ptr, squares_ptr, at, at_B, tile, is_in, is_row, num_outputs,
    OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Store the new x, x times the norm's weight, and the sums of its squares."""
    element = x_ptr.dtype.element_ty
    added = tl.trans(sums).to(element).to(tl.float32)
    rounded = (x.to(tl.float32) + added).to(element)
    tl.store(x_ptr + at, rounded, mask=is_in)
    whole = rounded.to(tl.float32)
    tl.store(scaled_ptr + at, (whole * norm[None, :]).to(element), mask=is_in)
    squares = tl.sum(tl.where(is_in, whole * whole, 0.0), 1)
    num_tiles = tl.cdiv(num_outputs, OUTPUTS)
    tl.store(squares_ptr + at_B * num_tiles + tile, squares, mask=is_row)


@triton.jit
def _added(
    inputs_desc, weight_desc, x_ptr, norm_ptr, scaled_ptr, squares_ptr, sums_ptr, arrived_ptr,
    b_ptr, low_ptr, next_ptr, scale, num_rows, num_inputs, num_outputs,
    AHEAD: tl.constexpr, LOW_WIDTH: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr,
    SHARES: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # For a tile of A, the shares are the parts of A x.
    in_share: tl.constexpr = PARTS // SHARES
    lows: tl.constexpr = AHEAD // OUTPUTS
    row, share = tl.program_id(0) * ROWS, tl.program_id(2)
    place, part = _place(AHEAD, in_share, OUTPUTS)
    output = place - AHEAD
    at_B, at_O = row + tl.arange(0, ROWS), output + tl.arange(0, OUTPUTS)
    is_row, is_output = at_B < num_rows, (at_O >= 0) & (at_O < num_outputs)
    is_in = is_row[:, None] & is_output[None, :]
    at = at_B[:, None] * num_outputs + at_O[None, :]
    element = x_ptr.dtype.element_ty
    if RANK > 0:
        b = rows_of_b(b_ptr, at_O, is_output, 0, RANK, COLUMNS, PADDED_PARTS)
    norm = tl.load(norm_ptr + at_O, mask=is_output, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    is_low = tl.program_id(1) < lows * in_share if AHEAD > 0 else False
    if is_low:
        let_next_start(EARLY)
        part += share * in_share
        leave_part(
            inputs_desc, weight_desc, tl.full((ROWS,), 1.0, tl.float32), low_ptr, next_ptr,
            num_inputs, row, place, part, at_B, is_row, LOW_WIDTH, PART, PARTS, OUTPUTS, ROWS,
            INPUTS, PRECISION, element,
        )  # fmt: skip
    else:
        x = tl.load(x_ptr + at, mask=is_in, other=0.0)
        per_share = tl.cdiv(tl.cdiv(num_inputs, INPUTS), SHARES) * INPUTS
        first = share * per_share
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for start in range(first, tl.minimum(first + per_share, num_inputs), INPUTS):
            weight, inputs = weight_desc.load([place, start]), inputs_desc.load([row, start])
            sums = tl.dot(weight, tl.trans(inputs), sums, input_precision=PRECISION)
        let_next_start(EARLY)
        tile = output // OUTPUTS
        is_whole = True
        if SHARES > 1:
            at_tile = tile * tl.num_programs(0) + tl.program_id(0)
            is_whole, sums = sum_of_shares(
                sums, sums_ptr, arrived_ptr, at_tile, share, OUTPUTS, ROWS, SHARES
            )
        if is_whole:
            if RANK > 0:
                low = low_of(
                    low_ptr, 0, at_B, is_row, RANK, COLUMNS, LOW_WIDTH, PART, PARTS, PADDED_PARTS,
                    element,
                )  # fmt: skip
                sums += scale * tl.dot(b, low, input_precision=PRECISION)
            _store_sum(
                sums, x, norm, x_ptr, scaled_ptr, squares_ptr, at, at_B, tile, is_in, is_row,
                num_outputs, OUTPUTS,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rows times the weight of a norm, and the sums of squares of the rows without it.

    There are no sums if the rows are already normed.
    """

    rows_BD: Tensor
    squares_BT: Tensor | None = None

    def options(self) -> dict[str, int]:
        tiles = 0 if self.squares_BT is None else self.squares_BT.shape[1]
        return {"TILES": tiles, "PADDED_TILES": triton.next_power_of_2(max(tiles, 1))}


def into_heads(
    x: Scaled,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    *,
    eps: float,
    adapter: LowRank | None = None,
) -> Tensor:
    """Return [B, O]: q, k and v of the normed rows, side by side."""
    factors = Factors.of(weight_OD, adapter)
    (num_rows, width), num_outputs = x.rows_BD.shape, factors.num_outputs
    tiles = tiles_for(num_rows, factors.weight_PK)
    out_BO = x.rows_BD.new_empty(num_rows, num_outputs)
    _into_heads[tiles.grid(num_rows, factors.num_rows(tiles.parts))](
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
        **factors.options(tiles.parts),
        **x.options(),
        **tiles.options(out_BO),
    )
    return out_BO


def gated(x: Scaled, weight_OD: Tensor, *, eps: float, adapter: LowRank | None = None) -> Tensor:
    """Return silu(gate) * up, [B, I]. `weight_OD` holds the rows of gate, then those of up."""
    factors = Factors.of(weight_OD, adapter)
    (num_rows, width), num_outputs = x.rows_BD.shape, factors.num_outputs // 2
    tiles = tiles_for_gated(num_rows, factors.weight_PK)
    out_BI = x.rows_BD.new_empty(num_rows, num_outputs)
    _gated[tiles.grid(num_rows, factors.num_rows(tiles.parts) - num_outputs)](
        *tiles.descriptors(x.rows_BD, factors.weight_PK),
        x.squares_BT,
        out_BI,
        *factors.tensors(),
        eps,
        factors.scale,
        num_rows,
        width,
        num_outputs,
        **factors.options(tiles.parts, num_maps=2),
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
    """Compute x += inputs @ weight.T in place. Return x as the next product's input."""
    factors = Factors.of(weight_OK, adapter)
    (num_rows, num_outputs), num_inputs = x_BO.shape, inputs_BK.shape[1]
    tiles = tiles_for(num_rows, factors.weight_PK)
    grid = tiles.grid(num_rows, factors.num_rows(tiles.parts // tiles.shares))
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
        **factors.options(tiles.parts),
        SHARES=tiles.shares,
        **tiles.options(x_BO),
    )
    return Scaled(scaled_BO, squares_BT)
