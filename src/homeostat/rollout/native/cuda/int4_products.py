"""Linear maps with packed INT4 weights on tensor cores: one launch each, which includes the norm
before and the sum or gating after a map.

    into_heads   q, k and v              three weights, one matrix
    gated        silu(gate) * up         two weights, one matrix
    added        x += inputs @ weight.T  in place, and what the next norm needs

A program owns a tile of outputs and rows. If there are few such tiles, several programs share the
inputs of one, and the last to finish adds up their results. A program reads tiles of the weights
into registers, converts their integers to bf16 and multiplies them with the rows, group by group;
the weights exist in memory only in packed form. A norm costs no launch, as in products.py. Few rows
have a separate kernel (int4_few.py).

Suffixes: `_B` rows, `_D` model dim, `_I` the MLP's inner dim, `_O` outputs, `_K` inputs, `_T` tiles
of outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda import int4_few
from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.int4_layout import Int4Matrix
from homeostat.rollout.native.cuda.int4_tiles import plane_of, words_at
from homeostat.rollout.native.cuda.products import Scaled
from homeostat.rollout.native.cuda.shares import is_last


@dataclass(frozen=True, slots=True)
class Tile:
    """The tiling of a product: outputs and rows of a program, the number of programs that share the
    inputs, and how the program is compiled."""

    outputs: int
    rows: int
    shares: int
    warps: int
    stages: int


@triton.jit
def _scales(scales_ptr, at_O, is_out, unit, num_units, GROUPS: tl.constexpr):
    """Load the scales of a unit's groups; nothing is read beyond the last group."""
    at_first = ((at_O // 16).to(tl.int64) * num_units + unit) * (GROUPS * 16) + at_O % 16
    is_there = is_out & (at_O < tl.where(unit < num_units, at_O + 1, 0))
    found = ()
    for group in tl.static_range(GROUPS):
        found += (tl.load(scales_ptr + at_first + group * 16, mask=is_there, other=0.0),)
    return found


@triton.jit
def _weights(words, GROUP: tl.constexpr, HALF: tl.constexpr, HAS_ASM: tl.constexpr,
             dtype: tl.constexpr, OUTPUTS: tl.constexpr):  # fmt: skip
    """Return weights [OUTPUTS, inputs] of tiles: all 64 inputs or, for groups of 32, one half."""
    if GROUP > 32:
        even = tl.join(plane_of(words, 0, HAS_ASM, dtype), plane_of(words, 2, HAS_ASM, dtype))
        odd = tl.join(plane_of(words, 1, HAS_ASM, dtype), plane_of(words, 3, HAS_ASM, dtype))
        parts = tl.reshape(tl.join(even, odd), (OUTPUTS // 16, 8, 4, 2, 2, 2, 4))
    else:
        first = plane_of(words, 2 * HALF, HAS_ASM, dtype)
        second = plane_of(words, 2 * HALF + 1, HAS_ASM, dtype)
        parts = tl.reshape(tl.join(first, second), (OUTPUTS // 16, 8, 4, 2, 2, 2, 2))
    # Tiles, halves of 8 outputs, outputs; planes, halves of 8 inputs, pairs, inputs.
    parts = tl.permute(parts, (0, 3, 1, 6, 4, 2, 5))
    return tl.reshape(parts, (OUTPUTS, GROUP if GROUP < 64 else 64))


@triton.jit
def _sums_of_unit(
    sums, scales, x_ptr, words_ptr, at_B, is_row, first_tile, unit, num_inputs, num_units,
    num_tiles, GROUP: tl.constexpr, HAS_ASM: tl.constexpr, PRECISION: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the products of a unit's groups."""
    inputs: tl.constexpr = GROUP if GROUP < 64 else 64
    blocks: tl.constexpr = GROUP // 64 if GROUP > 64 else 1
    groups: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
    at_word = tl.arange(0, OUTPUTS * 16)
    tile = first_tile + at_word // 256
    for group in tl.static_range(groups):
        part = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for number in tl.static_range(blocks):
            block = unit * blocks + number
            words = words_at(words_ptr, tile, block, tile < num_tiles, num_units * blocks)
            at_K = block * 64 + group * inputs + tl.arange(0, inputs)
            at_x = at_B[:, None].to(tl.int64) * num_inputs + at_K[None, :]
            is_in = is_row[:, None] & (at_K < num_inputs)[None, :]
            x = tl.load(x_ptr + at_x, mask=is_in, other=0.0)
            weight = _weights(words, GROUP, group, HAS_ASM, x.dtype, OUTPUTS)
            part = tl.dot(weight, tl.trans(x), part, input_precision=PRECISION)
        sums += part * scales[group].to(tl.float32)[:, None]
    return sums


@triton.jit
def _rstd(squares_ptr, at_B, is_row, width, eps, TILES: tl.constexpr, PADDED_TILES: tl.constexpr):
    at_T = tl.arange(0, PADDED_TILES)
    is_in = is_row[:, None] & (at_T < TILES)[None, :]
    at = squares_ptr + at_B[:, None] * TILES + at_T[None, :]
    squares = tl.load(at, mask=is_in, other=0.0)
    return 1.0 / tl.sqrt(tl.sum(squares, 1) / width + eps)


@triton.jit
def _whole(sums, sums_ptr, arrived_ptr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
           SHARES: tl.constexpr):  # fmt: skip
    """Return whether this program is the last of its tile, and if so the tile's sums."""
    size: tl.constexpr = OUTPUTS * ROWS
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    at = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    at_first = sums_ptr + tile * SHARES * size + at
    tl.store(at_first + tl.program_id(2) * size, sums)
    are_all = is_last(arrived_ptr + tile, SHARES)
    if are_all:
        sums = tl.load(at_first, cache_modifier=".cg")
        for other in range(1, SHARES):
            sums += tl.load(at_first + other * size, cache_modifier=".cg")
    return are_all, sums


@triton.jit
def _product(
    x_ptr, words_ptr, scales_ptr, bias_ptr, out_ptr, norm_ptr, scaled_ptr, squares_ptr, sums_ptr,
    arrived_ptr, eps, num_rows, num_inputs, num_units, num_outputs,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, IS_ADDED: tl.constexpr, TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr, GROUP: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    SHARES: tl.constexpr, HAS_ASM: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
    at_B = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at_O = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_out = at_B < num_rows, at_O < num_outputs
    wait_for_last(EARLY)
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    if IS_GATED:
        up_sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    per_share = tl.cdiv(num_units, SHARES)
    first = tl.program_id(2) * per_share
    end = tl.minimum(first + per_share, num_units)
    tile, num_tiles = tl.program_id(1) * (OUTPUTS // 16), num_outputs // 16
    scales = _scales(scales_ptr, at_O, is_out, first, num_units, groups)
    if IS_GATED:
        at_up = num_outputs + at_O
        up_scales = _scales(scales_ptr, at_up, is_out, first, num_units, groups)
    for unit in range(first, end):
        # The next unit's scales are in flight while this one is multiplied.
        next_scales = _scales(scales_ptr, at_O, is_out, unit + 1, num_units, groups)
        sums = _sums_of_unit(
            sums, scales, x_ptr, words_ptr, at_B, is_row, tile, unit, num_inputs, num_units,
            num_tiles, GROUP, HAS_ASM, PRECISION, OUTPUTS, ROWS,
        )  # fmt: skip
        scales = next_scales
        if IS_GATED:
            next_scales = _scales(scales_ptr, at_up, is_out, unit + 1, num_units, groups)
            up_sums = _sums_of_unit(
                up_sums, up_scales, x_ptr, words_ptr, at_B, is_row, num_tiles + tile, unit,
                num_inputs, num_units, 2 * num_tiles, GROUP, HAS_ASM, PRECISION, OUTPUTS, ROWS,
            )  # fmt: skip
            up_scales = next_scales
    let_next_start(EARLY)
    is_whole = True
    if SHARES > 1:
        is_whole, sums = _whole(sums, sums_ptr, arrived_ptr, OUTPUTS, ROWS, SHARES)
    if is_whole:
        if TILES > 0:
            rstd = _rstd(squares_ptr, at_B, is_row, num_inputs, eps, TILES, PADDED_TILES)[None, :]
            sums *= rstd
        at_out = at_B[:, None].to(tl.int64) * num_outputs + at_O[None, :]
        is_in = is_row[:, None] & is_out[None, :]
        if IS_GATED:
            if TILES > 0:
                up_sums *= rstd
            _store_gated(sums, up_sums, out_ptr + at_out, is_in, out_ptr.dtype.element_ty)
        else:
            _store(
                sums, bias_ptr, out_ptr, norm_ptr, scaled_ptr, squares_ptr, at_O, at_B, at_out,
                is_in, is_row, is_out, HAS_BIAS, IS_ADDED,
            )  # fmt: skip


@triton.jit
def _store(
    sums, bias_ptr, out_ptr, norm_ptr, scaled_ptr, squares_ptr, at_O, at_B, at_out, is_in, is_row,
    is_out, HAS_BIAS: tl.constexpr, IS_ADDED: tl.constexpr,
):  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias_ptr + at_O, mask=is_out, other=0.0).to(tl.float32)[:, None]
    out = tl.trans(sums).to(out_ptr.dtype.element_ty)
    if IS_ADDED:
        norm = tl.load(norm_ptr + at_O, mask=is_out, other=0.0).to(tl.float32)
        at_tile = squares_ptr + at_B * tl.num_programs(1) + tl.program_id(1)
        out = _added(out, out_ptr + at_out, scaled_ptr + at_out, at_tile, norm, is_in, is_row)
    tl.store(out_ptr + at_out, out, mask=is_in)


@triton.jit
def _store_gated(gate, up, at_out, is_in, element: tl.constexpr):
    gate, up = gate.to(element).to(tl.float32), up.to(element).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    tl.store(at_out, tl.trans((activated * up).to(element)), mask=is_in)


@triton.jit
def _added(out, at_out, at_scaled, at_squares, norm, is_in, is_row):
    """Return the sum with the residual rows, after storing what the next norm needs."""
    so_far = tl.load(at_out, mask=is_in, other=0.0)
    total = (so_far.to(tl.float32) + out.to(tl.float32)).to(so_far.dtype)
    whole = total.to(tl.float32)
    tl.store(at_scaled, (whole * norm[None, :]).to(so_far.dtype), mask=is_in)
    tl.store(at_squares, tl.sum(tl.where(is_in, whole * whole, 0.0), 1), mask=is_row)
    return total


# For more rows, weights are dequantised and a library multiplies.
MAX_ROWS = 64
# Programs that keep the device busy, and the largest number of programs that share inputs.
_BUSY, _MAX_SHARES = 264, 12
# The largest number of partial sums: tiles x shares x outputs x rows.
_ROOM = 1 << 20


class Scratch:
    """Device memory for the partial sums of shares. All products use it, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.empty(_ROOM, device=device, dtype=torch.float32)
        self.arrived = torch.zeros(_BUSY, device=device, dtype=torch.int32)


def tile_for(num_rows: int, num_outputs: int, matrix: Int4Matrix, *, is_gated: bool) -> Tile:
    """Return the tile of a product.

    It holds all rows, because every further tile of rows would convert the weights again. If there
    are few tiles, programs share their inputs.
    """
    rows = min(max(triton.next_power_of_2(num_rows), 16), MAX_ROWS)
    outputs = 64
    tiles = triton.cdiv(num_outputs, outputs) * triton.cdiv(num_rows, rows)
    shares = 1
    if not is_gated and tiles < _BUSY:
        most = _ROOM // (tiles * outputs * rows)
        shares = max(1, min(_BUSY // tiles, _MAX_SHARES, matrix.num_units, most))
    return Tile(outputs, rows, shares, warps=4, stages=4 if rows <= 32 else 3)


def into_heads(
    x: Scaled, matrix: Int4Matrix, bias_O: Tensor | None, scratch: Scratch, *, eps: float
) -> Tensor:
    """Return [B, O]: q, k and v of the normed rows, side by side."""
    out_BO = x.rows_BD.new_empty(len(x.rows_BD), matrix.num_outputs)
    launch(x, matrix, out_BO, scratch, bias_O=bias_O, eps=eps)
    return out_BO


def gated(x: Scaled, matrix: Int4Matrix, scratch: Scratch, *, eps: float) -> Tensor:
    """Return silu(gate) * up of the normed rows, [B, I]. The matrix: rows of gate, then of up."""
    out_BI = x.rows_BD.new_empty(len(x.rows_BD), matrix.num_outputs // 2)
    launch(x, matrix, out_BI, scratch, is_gated=True, eps=eps)
    return out_BI


def added(
    x_BO: Tensor,
    inputs_BK: Tensor,
    matrix: Int4Matrix,
    bias_O: Tensor | None,
    norm_O: Tensor,
    scratch: Scratch,
) -> Scaled:
    """Compute x += inputs @ weight.T + bias in place. Return x as the next product's input."""
    how = {"bias_O": bias_O, "norm_O": norm_O}
    return launch(Scaled(inputs_BK), matrix, x_BO, scratch, **how)


def launch(
    x: Scaled,
    matrix: Int4Matrix,
    out_BO: Tensor,
    scratch: Scratch,
    *,
    bias_O: Tensor | None = None,
    norm_O: Tensor | None = None,
    is_gated: bool = False,
    eps: float = 0.0,
    tile: Tile | None = None,
) -> Scaled:
    """Write a product to `out`; with `norm_O`, add it to `out` and return the next norm's input."""
    num_rows, num_outputs = out_BO.shape
    if tile is None and num_rows <= int4_few.MAX_ROWS:
        how = {"bias_O": bias_O, "norm_O": norm_O, "is_gated": is_gated, "eps": eps}
        return int4_few.launch(x, matrix, out_BO, **how)
    tile = tile or tile_for(num_rows, num_outputs, matrix, is_gated=is_gated)
    grid = triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs), tile.shares
    squares_BT, scaled_BO = x.squares_BT, out_BO
    if norm_O is not None:
        assert squares_BT is None, "what is added has no norm before it"
        scaled_BO = torch.empty_like(out_BO)
        squares_BT = torch.empty(num_rows, grid[1], dtype=torch.float32, device=out_BO.device)
    _product[grid](
        x.rows_BD,
        matrix.words_TBW,
        matrix.scales_TGP,
        out_BO if bias_O is None else bias_O,
        out_BO,
        out_BO if norm_O is None else norm_O,
        scaled_BO,
        out_BO if squares_BT is None else squares_BT,
        scratch.sums,
        scratch.arrived,
        eps,
        num_rows,
        matrix.num_inputs,
        matrix.num_units,
        num_outputs,
        HAS_BIAS=bias_O is not None,
        IS_GATED=is_gated,
        IS_ADDED=norm_O is not None,
        GROUP=matrix.group_size,
        **x.options(),
        **_options(tile, out_BO),
    )
    return Scaled(scaled_BO, squares_BT)


def _options(tile: Tile, out_BO: Tensor) -> dict[str, Any]:
    return {
        "OUTPUTS": tile.outputs,
        "ROWS": tile.rows,
        "SHARES": tile.shares,
        # The assembly handles bf16 on a GPU only.
        "HAS_ASM": out_BO.is_cuda and out_BO.dtype == torch.bfloat16,
        "PRECISION": "ieee" if out_BO.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **early(out_BO.device),
    }
