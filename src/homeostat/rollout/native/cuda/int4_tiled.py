"""Linear maps of a batch's rows by INT4 weights, on tensor cores.

A program owns a tile of outputs and rows and, where such tiles are few, a share of the inputs. It
turns the integers of a block into bf16 weights in registers, plane by plane (int4_layout.py), and
multiplies them: the weights are never in memory in any other form. They are exact.

Suffixes: `_B` rows, `_O` outputs, `_K` inputs.
"""

# Triton compiles its kernels from source: pyright misreads their calls.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.int4_layout import Int4Matrix
from homeostat.rollout.native.cuda.int4_narrow import plane_of
from homeostat.rollout.native.cuda.products import Scratch
from homeostat.rollout.native.cuda.shares import is_last


@dataclass(frozen=True, slots=True)
class Tile:
    """Outputs and rows of a program, parts of the inputs that are computed in parallel, and how
    the program is compiled."""

    outputs: int
    rows: int
    shares: int
    warps: int
    stages: int


@triton.jit
def _weight(words, scales, NUMBER: tl.constexpr):
    # 24 + q times the scale, less 24 scales: exactly q times the scale.
    return plane_of(words, NUMBER) * scales - 24.0 * scales


@triton.jit
def _tiled(
    x_ptr, words_ptr, scales_ptr, bias_ptr, out_ptr, sums_ptr, arrived_ptr, num_rows, num_inputs,
    num_blocks, num_scales, num_outputs, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    IS_ADDED: tl.constexpr, GROUP: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    SHARES: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    at_B = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at_O = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    share = tl.program_id(2)
    is_row, is_out = at_B < num_rows, at_O < num_outputs
    per_share = tl.cdiv(num_blocks, SHARES)
    wait_for_last(EARLY)
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    if IS_GATED:
        up_sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    at_word = at_O[:, None].to(tl.int64) * (num_blocks * 32) + tl.arange(0, 32)[None, :]
    at_row = at_B[None, :].to(tl.int64) * num_inputs + tl.arange(0, 32)[:, None]
    for block in range(share * per_share, tl.minimum((share + 1) * per_share, num_blocks)):
        words = tl.load(words_ptr + at_word + block * 32, mask=is_out[:, None], other=0)
        if IS_GATED:
            up_ptr = words_ptr + num_outputs.to(tl.int64) * num_blocks * 32
            up_words = tl.load(up_ptr + at_word + block * 32, mask=is_out[:, None], other=0)
        for plane in tl.static_range(8):
            start = block * 256 + plane * 32
            is_in = is_row[None, :] & (start + tl.arange(0, 32) < num_inputs)[:, None]
            x = tl.load(x_ptr + at_row + start, mask=is_in, other=0.0)
            at_scale = scales_ptr + (start // GROUP).to(tl.int64) * num_scales + at_O
            scales = tl.load(at_scale, mask=is_out, other=0.0).to(tl.float32)[:, None]
            weight = _weight(words, scales, plane).to(x.dtype)
            sums = tl.dot(weight, x, sums, input_precision=PRECISION)
            if IS_GATED:
                scales = tl.load(at_scale + num_outputs, mask=is_out, other=0.0)
                weight = _weight(up_words, scales.to(tl.float32)[:, None], plane).to(x.dtype)
                up_sums = tl.dot(weight, x, up_sums, input_precision=PRECISION)
    let_next_start(EARLY)
    is_whole = True
    if SHARES > 1:
        size: tl.constexpr = OUTPUTS * ROWS
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        at = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        at_first = sums_ptr + tile * SHARES * size + at
        tl.store(at_first + share * size, sums)
        is_whole = is_last(arrived_ptr + tile, SHARES)
        if is_whole:
            sums = tl.load(at_first, cache_modifier=".cg")
            for other in tl.static_range(1, SHARES):
                sums += tl.load(at_first + other * size, cache_modifier=".cg")
    if is_whole:
        element = out_ptr.dtype.element_ty
        at_out = out_ptr + at_B[:, None].to(tl.int64) * num_outputs + at_O[None, :]
        is_in = is_row[:, None] & is_out[None, :]
        if IS_GATED:
            gate, up = sums.to(element).to(tl.float32), up_sums.to(element).to(tl.float32)
            activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
            tl.store(at_out, tl.trans((activated * up).to(element)), mask=is_in)
        else:
            if HAS_BIAS:
                bias = tl.load(bias_ptr + at_O, mask=is_out, other=0.0)
                sums += bias.to(tl.float32)[:, None]
            out = tl.trans(sums).to(element)
            if IS_ADDED:
                so_far = tl.load(at_out, mask=is_in, other=0.0).to(tl.float32)
                out = (so_far + out.to(tl.float32)).to(element)
            tl.store(at_out, out, mask=is_in)


# Programs that keep the device busy.
_BUSY = 264
# The room of `products.Scratch`: tiles that are shared out, and rows of one.
_SHARED, _SHARED_ROWS = 128, 128


def tile_for(num_rows: int, matrix: Int4Matrix, *, is_gated: bool = False) -> Tile:
    """Return the tile of a product: all rows at once, because each tile of rows makes the weights
    anew, and shares of the inputs where there are few tiles."""
    rows = min(max(triton.next_power_of_2(num_rows), 16), 128)
    outputs = 64
    tiles = triton.cdiv(matrix.num_outputs, outputs) * triton.cdiv(num_rows, rows)
    shares = 1
    if not is_gated and tiles <= _SHARED // 2:
        shares = min(max(_SHARED // tiles, 1), 4, matrix.num_blocks)
    return Tile(outputs, rows, shares, warps=4, stages=3)


def into_heads(x_BD: Tensor, matrix: Int4Matrix, bias_O: Tensor | None, scratch: Scratch) -> Tensor:
    """[B, O]: q, k and v of normed rows, one after the other."""
    out_BO = x_BD.new_empty(len(x_BD), matrix.num_outputs)
    _launch(x_BD, matrix, out_BO, scratch, tile_for(len(x_BD), matrix), bias_O=bias_O)
    return out_BO


def gated(x_BD: Tensor, matrix: Int4Matrix, scratch: Scratch) -> Tensor:
    """[B, I]: silu(gate) * up of normed rows. The matrix has gate's rows, then up's."""
    out_BI = x_BD.new_empty(len(x_BD), matrix.num_outputs // 2)
    tile = tile_for(len(x_BD), matrix, is_gated=True)
    _launch(x_BD, matrix, out_BI, scratch, tile, is_gated=True)
    return out_BI


def added(
    x_BO: Tensor,
    inputs_BK: Tensor,
    matrix: Int4Matrix,
    bias_O: Tensor | None,
    scratch: Scratch,
) -> None:
    """Compute x += inputs @ weight.T + bias in place."""
    tile = tile_for(len(inputs_BK), matrix)
    _launch(inputs_BK, matrix, x_BO, scratch, tile, bias_O=bias_O, is_added=True)


def _launch(
    x_BK: Tensor,
    matrix: Int4Matrix,
    out_BO: Tensor,
    scratch: Scratch,
    tile: Tile,
    *,
    bias_O: Tensor | None = None,
    is_gated: bool = False,
    is_added: bool = False,
) -> None:
    num_rows, num_outputs = len(x_BK), out_BO.shape[1]
    grid = triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs), tile.shares
    _tiled[grid](
        x_BK,
        matrix.words_OW,
        matrix.scales_GO,
        x_BK if bias_O is None else bias_O,
        out_BO,
        scratch.sums,
        scratch.arrived,
        num_rows,
        matrix.num_inputs,
        matrix.num_blocks,
        matrix.num_outputs,
        num_outputs,
        HAS_BIAS=bias_O is not None,
        IS_GATED=is_gated,
        IS_ADDED=is_added,
        GROUP=matrix.group_size,
        OUTPUTS=tile.outputs,
        ROWS=tile.rows,
        SHARES=tile.shares,
        PRECISION="ieee" if x_BK.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **early(out_BO.device),
    )
