"""Linear maps of very few rows over e4m3 weights: narrow.py's in half the bytes.

A program owns some outputs of one row. It reads their weights before it waits for its inputs, and
sums products of e4m3 numbers in fp32, block by block.

    into_heads   norm -> cast -> q, k and v     one weight of all three
    gated        cast rows -> silu(gate) * up   one weight of both
    added        x += cast rows @ weight.T      in place

Rows are cast by a kernel of their own (fp8_rows.py) where many programs would repeat it; few
outputs of narrow rows norm and cast them themselves, which spares a launch.

Suffixes: `_B` rows, `_D` model dim, `_I` the MLP's inner dim, `_O` outputs, `_K` inputs.
"""

# Triton compiles its kernels from source: pyright misreads their calls.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels.e4m3 import BLOCK, amax_of_blocks, quantised_blocks
from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.fp8_rows import Fp8Rows
from homeostat.rollout.native.fp8_weights import Fp8Weight

# Outputs of a program, and the weights of each of its matrices that it holds at once.
OUTPUTS = 4
_HELD = 16_384
# Blocks of inputs that `added` multiplies at a time.
BLOCKS = 16


@triton.jit
def _weights(weight_ptr, at_O, is_out, first, num_inputs, BLOCKS: tl.constexpr):
    """[outputs, BLOCKS, BLOCK]"""
    at_K = first + tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_in = is_out[:, None, None] & (at_K < num_inputs)[None, :, :]
    at = at_O[:, None, None].to(tl.int64) * num_inputs + at_K[None, :, :]
    return tl.load(weight_ptr + at, mask=is_in, other=0.0)


@triton.jit
def _scales(
    scales_ptr, pitch, at_O, is_out, first, num_inputs, BLOCKS: tl.constexpr,
    BLOCKWISE: tl.constexpr,
):  # fmt: skip
    """The weights' scales, [outputs, BLOCKS] or [outputs, 1]."""
    if BLOCKWISE:
        at_G = first // BLOCK + tl.arange(0, BLOCKS)
        is_in = is_out[:, None] & (at_G < tl.cdiv(num_inputs, BLOCK))[None, :]
        at = (at_O // BLOCK)[:, None] * pitch + at_G[None, :]
        scales = tl.load(scales_ptr + at, mask=is_in, other=0.0)
    else:
        scales = tl.load(scales_ptr + at_O, mask=is_out, other=0.0)[:, None]
    return scales


@triton.jit
def _normed(x_ptr, norm_ptr, row, width, eps, BLOCKS: tl.constexpr):
    """A row after its norm, as the module rounds it: fp32 [BLOCKS, BLOCK]."""
    at_D = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_in = at_D < width
    x = tl.load(x_ptr + row * width + at_D, mask=is_in, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(tl.sum(x * x, 1), 0) / width + eps)
    weight = tl.load(norm_ptr + at_D, mask=is_in, other=0.0).to(tl.float32)
    return (x * rstd * weight).to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _cast_row(
    x_ptr, x_scales_ptr, row, first, num_inputs, num_rows, BLOCKS: tl.constexpr,
    BLOCKWISE: tl.constexpr,
):  # fmt: skip
    """A part of a row that was cast: e4m3 [BLOCKS, BLOCK], and its scales [BLOCKS] or [1]."""
    at_K = first + tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * num_inputs + at_K, mask=at_K < num_inputs, other=0.0)
    if BLOCKWISE:
        at_G = first // BLOCK + tl.arange(0, BLOCKS)
        is_in = at_G < tl.cdiv(num_inputs, BLOCK)
        scales = tl.load(x_scales_ptr + at_G * num_rows + row, mask=is_in, other=0.0)
    else:
        scales = tl.load(x_scales_ptr + row + tl.zeros((1,), tl.int32))
    return x, scales


@triton.jit
def _sums(weight, x, scales):
    """Of the products of weights [outputs, blocks, BLOCK] with x [blocks, BLOCK]: [outputs]."""
    products = weight.to(tl.float32) * x.to(tl.float32)[None, :, :]
    return tl.sum(tl.sum(products, 2) * scales, 1)


@triton.jit
def _into_heads(
    x_ptr, norm_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, pitch, eps, width, num_outputs,
    HAS_BIAS: tl.constexpr, BLOCKWISE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    at_O, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    is_out = at_O < num_outputs
    weight = _weights(weight_ptr, at_O, is_out, 0, width, BLOCKS)
    scales = _scales(scales_ptr, pitch, at_O, is_out, 0, width, BLOCKS, BLOCKWISE)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + at_O, mask=is_out, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    x = _normed(x_ptr, norm_ptr, row, width, eps, BLOCKS)
    x, x_scales = quantised_blocks(x, amax_of_blocks(x, BLOCKWISE), POWER_OF_TWO)
    out = _sums(weight, x, scales * x_scales[None, :])
    if HAS_BIAS:
        out += bias
    at = out_ptr + row * num_outputs + at_O
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def _gated(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, out_ptr, pitch, width, num_outputs,
    BLOCKWISE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    at_O, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    is_out, at_up = at_O < num_outputs, at_O + num_outputs
    gate_weight = _weights(weight_ptr, at_O, is_out, 0, width, BLOCKS)
    up_weight = _weights(weight_ptr, at_up, is_out, 0, width, BLOCKS)
    gate_scales = _scales(scales_ptr, pitch, at_O, is_out, 0, width, BLOCKS, BLOCKWISE)
    up_scales = _scales(scales_ptr, pitch, at_up, is_out, 0, width, BLOCKS, BLOCKWISE)
    wait_for_last(EARLY)
    x, x_scales = _cast_row(
        x_ptr, x_scales_ptr, row, 0, width, tl.num_programs(1), BLOCKS, BLOCKWISE
    )
    element = out_ptr.dtype.element_ty
    gate = _sums(gate_weight, x, gate_scales * x_scales[None, :]).to(element).to(tl.float32)
    up = _sums(up_weight, x, up_scales * x_scales[None, :]).to(element).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    tl.store(out_ptr + row * num_outputs + at_O, (activated * up).to(element), mask=is_out)


@triton.jit
def _added(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, out_ptr, pitch, num_inputs, num_outputs,
    BLOCKWISE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    at_O, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    is_out, step = at_O < num_outputs, BLOCKS * BLOCK
    weight = _weights(weight_ptr, at_O, is_out, 0, num_inputs, BLOCKS)
    scales = _scales(scales_ptr, pitch, at_O, is_out, 0, num_inputs, BLOCKS, BLOCKWISE)
    wait_for_last(EARLY)
    sums = tl.zeros((OUTPUTS, BLOCKS), tl.float32)
    for start in range(0, num_inputs, step):
        x, x_scales = _cast_row(
            x_ptr, x_scales_ptr, row, start, num_inputs, tl.num_programs(1), BLOCKS, BLOCKWISE
        )
        products = weight.to(tl.float32) * x.to(tl.float32)[None, :, :]
        sums += tl.sum(products, 2) * (scales * x_scales[None, :])
        # Beyond the end nothing is read.
        weight = _weights(weight_ptr, at_O, is_out, start + step, num_inputs, BLOCKS)
        scales = _scales(
            scales_ptr, pitch, at_O, is_out, start + step, num_inputs, BLOCKS, BLOCKWISE
        )
    element = out_ptr.dtype.element_ty
    added = tl.sum(sums, 1).to(element).to(tl.float32)
    at = out_ptr + row * num_outputs + at_O
    so_far = tl.load(at, mask=is_out, other=0.0).to(tl.float32)
    tl.store(at, (so_far + added).to(element), mask=is_out)


def into_heads(
    x_BD: Tensor, norm_D: Tensor, weight: Fp8Weight, bias_O: Tensor | None, *, eps: float
) -> Tensor:
    """[B, O]: q, k and v of the normed rows, one after the other."""
    (num_rows, width), num_outputs = x_BD.shape, weight.num_outputs
    out_BO = x_BD.new_empty(num_rows, num_outputs)
    _into_heads[(triton.cdiv(num_outputs, OUTPUTS), num_rows)](
        x_BD,
        norm_D,
        weight.values_OK,
        weight.scales,
        out_BO if bias_O is None else bias_O,
        out_BO,
        weight.pitch,
        eps,
        width,
        num_outputs,
        HAS_BIAS=bias_O is not None,
        BLOCKWISE=weight.scaling.is_blockwise,
        POWER_OF_TWO=weight.scaling.has_power_of_two_scales,
        OUTPUTS=OUTPUTS,
        BLOCKS=_padded_blocks(width),
        **early(out_BO.device),
    )
    return out_BO


def gated(x: Fp8Rows, weight: Fp8Weight, *, like: Tensor) -> Tensor:
    """[B, I] in the dtype of `like`. `weight`: gate's rows, then up's."""
    (num_rows, width), num_outputs = x.values_BK.shape, weight.num_outputs // 2
    out_BI = like.new_empty(num_rows, num_outputs)
    blocks = _padded_blocks(width)
    outputs = max(_HELD // (blocks * BLOCK.value), 1)
    _gated[(triton.cdiv(num_outputs, outputs), num_rows)](
        x.values_BK,
        x.scales_GB,
        weight.values_OK,
        weight.scales,
        out_BI,
        weight.pitch,
        width,
        num_outputs,
        BLOCKWISE=weight.scaling.is_blockwise,
        OUTPUTS=outputs,
        BLOCKS=blocks,
        **early(out_BI.device),
    )
    return out_BI


def added(x_BO: Tensor, inputs: Fp8Rows, weight: Fp8Weight) -> None:
    """Compute x += inputs @ weight.T in place."""
    num_rows, num_outputs = x_BO.shape
    tile = tile_of_added(num_outputs)
    _added[(triton.cdiv(num_outputs, tile["OUTPUTS"]), num_rows)](
        inputs.values_BK,
        inputs.scales_GB,
        weight.values_OK,
        weight.scales,
        x_BO,
        weight.pitch,
        inputs.values_BK.shape[1],
        num_outputs,
        BLOCKWISE=weight.scaling.is_blockwise,
        **tile,
        **early(x_BO.device),
    )


def tile_of_added(num_outputs: int) -> dict[str, Any]:
    """Larger programs where there are few outputs: more of the device works on each of them."""
    if num_outputs < 2048:
        return {"OUTPUTS": 2 * OUTPUTS, "BLOCKS": BLOCKS, "num_warps": 8}
    return {"OUTPUTS": 2 * OUTPUTS, "BLOCKS": BLOCKS // 2, "num_warps": 4}


def _padded_blocks(width: int) -> int:
    return triton.next_power_of_2(triton.cdiv(width, BLOCK.value))
