"""Linear maps of very few rows by INT4 weights, bound by reading them: one launch each, with what
comes before and after them.

A program owns some outputs of one row. An integer q becomes the float 24 + q by two operations on
bits: its nibble is moved to the top of the mantissa of a number between 16 and 32. What that adds
to a sum is 24 times the sum of the inputs, which is the same for all outputs of a program and is
taken off at once. A norm's root is a factor of the whole row, so that it is applied to the sums.

Suffixes: `_B` blocks of inputs, `_O` outputs, `_K` inputs.
"""

# Triton compiles its kernels from source: pyright misreads their calls.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.int4_layout import Int4Matrix

# Rows up to which reading the weights costs more than multiplying by them one by one.
MAX_ROWS = 4


@dataclass(frozen=True, slots=True)
class NarrowTile:
    """Outputs of a program, blocks of inputs that it multiplies at a time, and its warps."""

    outputs: int
    blocks: int
    warps: int


@triton.jit
def plane_of(words, NUMBER: tl.constexpr):
    """Return 24 + q of the integers in a nibble of each word."""
    # The nibble's place is the top of the mantissa, from bit 19 on.
    moved = words << (19 - 4 * NUMBER) if NUMBER < 5 else words >> (4 * NUMBER - 19)
    return ((moved & 0x780000) | 0x41800000).to(tl.float32, bitcast=True)


@triton.jit
def _words_of(words_ptr, at_O, is_out, start, num_blocks, BLOCKS: tl.constexpr):
    at_B = start + tl.arange(0, BLOCKS)
    at = (at_O[:, None].to(tl.int64) * num_blocks + at_B[None, :]) * 32
    at = at[:, :, None] + tl.arange(0, 32)[None, None, :]
    is_in = is_out[:, None] & (at_B < num_blocks)[None, :]
    return tl.load(words_ptr + at, mask=is_in[:, :, None], other=0)


@triton.jit
def _narrow(
    x_ptr, norm_ptr, words_ptr, scales_ptr, bias_ptr, out_ptr, eps, num_inputs, num_blocks,
    num_scales, num_outputs, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr, IS_ADDED: tl.constexpr, GROUP: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    row, at = tl.program_id(1), tl.arange(0, OUTPUTS)
    if IS_GATED:
        # Rows of the gate, and then those of up that belong to them.
        HALF: tl.constexpr = OUTPUTS // 2
        first = tl.program_id(0) * HALF
        is_out = first + at % HALF < num_outputs
        at_O = first + at % HALF + (at // HALF) * num_outputs
    else:
        first = tl.program_id(0) * OUTPUTS
        at_O = first + at
        is_out = at_O < num_outputs
    words = _words_of(words_ptr, at_O, is_out, 0, num_blocks, BLOCKS)
    wait_for_last(EARLY)
    sums = tl.zeros((OUTPUTS, BLOCKS, 32), tl.float32)
    squares = tl.zeros((BLOCKS, 32), tl.float32)
    for start in range(0, num_blocks, BLOCKS):
        at_B = start + tl.arange(0, BLOCKS)
        for group in tl.static_range(256 // GROUP):
            at_G = at_B * (256 // GROUP) + group
            at_scale = at_G[None, :].to(tl.int64) * num_scales + at_O[:, None]
            is_in = is_out[:, None] & (at_B < num_blocks)[None, :]
            scales = tl.load(scales_ptr + at_scale, mask=is_in, other=0.0).to(tl.float32)
            part = tl.zeros((OUTPUTS, BLOCKS, 32), tl.float32)
            offset = tl.zeros((BLOCKS, 32), tl.float32)
            for plane in tl.static_range(GROUP // 32):
                at_K = at_B[:, None] * 256 + (group * GROUP + plane * 32)
                at_K += tl.arange(0, 32)[None, :]
                is_input = at_K < num_inputs
                x = tl.load(x_ptr + row * num_inputs + at_K, mask=is_input, other=0.0)
                x = x.to(tl.float32)
                if HAS_NORM:
                    squares += x * x
                    x *= tl.load(norm_ptr + at_K, mask=is_input, other=0.0).to(tl.float32)
                offset += x
                part += plane_of(words, group * (GROUP // 32) + plane) * x[None, :, :]
            sums += (part - 24.0 * offset[None, :, :]) * scales[:, :, None]
        # Beyond the end nothing is read.
        words = _words_of(words_ptr, at_O, is_out, start + BLOCKS, num_blocks, BLOCKS)
    total = tl.sum(tl.sum(sums, 2), 1)
    if HAS_NORM:
        total *= 1.0 / tl.sqrt(tl.sum(tl.sum(squares, 1), 0) / num_inputs + eps)
    element = out_ptr.dtype.element_ty
    out_row = out_ptr + row * num_outputs
    if IS_GATED:
        gate, up = tl.split(tl.trans(tl.reshape(total, (2, OUTPUTS // 2))))
        gate, up = gate.to(element).to(tl.float32), up.to(element).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
        at_out = first + tl.arange(0, OUTPUTS // 2)
        tl.store(out_row + at_out, (activated * up).to(element), mask=at_out < num_outputs)
    else:
        if HAS_BIAS:
            total += tl.load(bias_ptr + at_O, mask=is_out, other=0.0).to(tl.float32)
        out = total.to(element)
        if IS_ADDED:
            so_far = tl.load(out_row + at_O, mask=is_out, other=0.0).to(tl.float32)
            out = (so_far + out.to(tl.float32)).to(element)
        tl.store(out_row + at_O, out, mask=is_out)


def tile_for(matrix: Int4Matrix, *, is_gated: bool = False) -> NarrowTile:
    """Return the tile of a product: more outputs share what is read of a row, where there are
    enough of them to keep the device busy."""
    outputs = 8 if is_gated or matrix.num_outputs >= 8192 else 4
    blocks = 2 if matrix.num_blocks <= 6 else 4
    return NarrowTile(outputs, blocks, warps=1)


def into_heads(
    x_BD: Tensor, norm_D: Tensor, matrix: Int4Matrix, bias_O: Tensor | None, *, eps: float
) -> Tensor:
    """[B, O]: q, k and v of the normed rows, one after the other."""
    out_BO = x_BD.new_empty(len(x_BD), matrix.num_outputs)
    _launch(x_BD, matrix, out_BO, tile_for(matrix), norm_D=norm_D, bias_O=bias_O, eps=eps)
    return out_BO


def gated(x_BD: Tensor, norm_D: Tensor, matrix: Int4Matrix, *, eps: float) -> Tensor:
    """[B, I]: silu(gate) * up of the normed rows. The matrix has gate's rows, then up's."""
    out_BI = x_BD.new_empty(len(x_BD), matrix.num_outputs // 2)
    tile = tile_for(matrix, is_gated=True)
    _launch(x_BD, matrix, out_BI, tile, norm_D=norm_D, is_gated=True, eps=eps)
    return out_BI


def added(
    x_BO: Tensor, inputs_BK: Tensor, matrix: Int4Matrix, bias_O: Tensor | None = None
) -> None:
    """Compute x += inputs @ weight.T + bias in place."""
    _launch(inputs_BK, matrix, x_BO, tile_for(matrix), bias_O=bias_O, is_added=True)


def _launch(
    x_BK: Tensor,
    matrix: Int4Matrix,
    out_BO: Tensor,
    tile: NarrowTile,
    *,
    norm_D: Tensor | None = None,
    bias_O: Tensor | None = None,
    is_gated: bool = False,
    is_added: bool = False,
    eps: float = 0.0,
) -> None:
    num_outputs = out_BO.shape[1]
    per_program = tile.outputs // 2 if is_gated else tile.outputs
    _narrow[(triton.cdiv(num_outputs, per_program), len(x_BK))](
        x_BK,
        x_BK if norm_D is None else norm_D,
        matrix.words_OW,
        matrix.scales_GO,
        x_BK if bias_O is None else bias_O,
        out_BO,
        eps,
        matrix.num_inputs,
        matrix.num_blocks,
        matrix.num_outputs,
        num_outputs,
        HAS_NORM=norm_D is not None,
        HAS_BIAS=bias_O is not None,
        IS_GATED=is_gated,
        IS_ADDED=is_added,
        GROUP=matrix.group_size,
        OUTPUTS=tile.outputs,
        BLOCKS=tile.blocks,
        num_warps=tile.warps,
        **early(out_BO.device),
    )
