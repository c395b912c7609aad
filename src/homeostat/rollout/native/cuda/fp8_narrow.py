"""Linear maps of very few rows over e4m3 weights: narrow.py's in half the bytes.

A program owns some outputs of one row. It reads their weights before it waits for its inputs, norms
these where a norm comes first, casts them to e4m3 as the trainer does, and sums products of e4m3
numbers in fp32, block by block.

    into_heads   norm -> cast -> q, k and v           one weight of all three
    gated        norm -> cast -> silu(gate) * up      one weight of both
    added        cast, x += out @ weight.T            in place

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
from homeostat.rollout.native.fp8_weights import Fp8Weight

# Outputs that a program sums up at a time, and blocks of inputs that `added` multiplies at a time.
OUTPUTS = 4
BLOCKS = 16
# Programs of a launch that loop over outputs.
PROGRAMS = 528


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
    row, step = tl.program_id(1), tl.num_programs(0) * OUTPUTS
    at_O = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_out = at_O < num_outputs
    weight = _weights(weight_ptr, at_O, is_out, 0, width, BLOCKS)
    scales = _scales(scales_ptr, pitch, at_O, is_out, 0, width, BLOCKS, BLOCKWISE)
    wait_for_last(EARLY)
    x = _normed(x_ptr, norm_ptr, row, width, eps, BLOCKS)
    x, x_scales = quantised_blocks(x, amax_of_blocks(x, BLOCKWISE), POWER_OF_TWO)
    for _ in range(tl.program_id(0) * OUTPUTS, num_outputs, step):
        # The next outputs' weights are in flight while these are summed up.
        next_O = at_O + step
        is_next = next_O < num_outputs
        next_weight = _weights(weight_ptr, next_O, is_next, 0, width, BLOCKS)
        next_scales = _scales(scales_ptr, pitch, next_O, is_next, 0, width, BLOCKS, BLOCKWISE)
        out = _sums(weight, x, scales * x_scales[None, :])
        if HAS_BIAS:
            out += tl.load(bias_ptr + at_O, mask=is_out, other=0.0).to(tl.float32)
        at = out_ptr + row * num_outputs + at_O
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_out)
        at_O, is_out, weight, scales = next_O, is_next, next_weight, next_scales


@triton.jit
def _both(
    weight_ptr, scales_ptr, pitch, at_O, width, num_outputs, BLOCKS: tl.constexpr,
    BLOCKWISE: tl.constexpr,
):  # fmt: skip
    """Weights and scales of gate and up."""
    is_out, at_up = at_O < num_outputs, at_O + num_outputs
    gate = _weights(weight_ptr, at_O, is_out, 0, width, BLOCKS)
    up = _weights(weight_ptr, at_up, is_out, 0, width, BLOCKS)
    gate_scales = _scales(scales_ptr, pitch, at_O, is_out, 0, width, BLOCKS, BLOCKWISE)
    up_scales = _scales(scales_ptr, pitch, at_up, is_out, 0, width, BLOCKS, BLOCKWISE)
    return gate, up, gate_scales, up_scales


@triton.jit
def _gated(
    x_ptr, norm_ptr, weight_ptr, scales_ptr, out_ptr, pitch, eps, width, num_outputs,
    BLOCKWISE: tl.constexpr, POWER_OF_TWO: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    row, step = tl.program_id(1), tl.num_programs(0) * OUTPUTS
    at_O = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    gate_weight, up_weight, gate_scales, up_scales = _both(
        weight_ptr, scales_ptr, pitch, at_O, width, num_outputs, BLOCKS, BLOCKWISE
    )
    wait_for_last(EARLY)
    x = _normed(x_ptr, norm_ptr, row, width, eps, BLOCKS)
    x, x_scales = quantised_blocks(x, amax_of_blocks(x, BLOCKWISE), POWER_OF_TWO)
    element = out_ptr.dtype.element_ty
    for _ in range(tl.program_id(0) * OUTPUTS, num_outputs, step):
        next_gate, next_up, next_gate_scales, next_up_scales = _both(
            weight_ptr, scales_ptr, pitch, at_O + step, width, num_outputs, BLOCKS, BLOCKWISE
        )
        gate = _sums(gate_weight, x, gate_scales * x_scales[None, :]).to(element).to(tl.float32)
        up = _sums(up_weight, x, up_scales * x_scales[None, :]).to(element).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
        at = out_ptr + row * num_outputs + at_O
        tl.store(at, (activated * up).to(element), mask=at_O < num_outputs)
        at_O += step
        gate_weight, up_weight = next_gate, next_up
        gate_scales, up_scales = next_gate_scales, next_up_scales


@triton.jit
def _inputs(x_ptr, row, first, num_inputs, BLOCKS: tl.constexpr):
    at_K = first + tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * num_inputs + at_K, mask=at_K < num_inputs, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _added(
    x_ptr, weight_ptr, scales_ptr, out_ptr, pitch, num_inputs, num_outputs,
    BLOCKWISE: tl.constexpr, POWER_OF_TWO: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    at_O, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    is_out, step = at_O < num_outputs, BLOCKS * BLOCK
    weight = _weights(weight_ptr, at_O, is_out, 0, num_inputs, BLOCKS)
    scales = _scales(scales_ptr, pitch, at_O, is_out, 0, num_inputs, BLOCKS, BLOCKWISE)
    wait_for_last(EARLY)
    amax = tl.zeros((BLOCKS,), tl.float32)
    if not BLOCKWISE:
        for start in range(0, num_inputs, step):
            x = _inputs(x_ptr, row, start, num_inputs, BLOCKS)
            amax = tl.maximum(amax, amax_of_blocks(x, BLOCKWISE))
    sums = tl.zeros((OUTPUTS, BLOCKS), tl.float32)
    x = _inputs(x_ptr, row, 0, num_inputs, BLOCKS)
    for start in range(0, num_inputs, step):
        # What is multiplied next is in flight meanwhile; beyond the end nothing is read.
        after = start + step
        next_weight = _weights(weight_ptr, at_O, is_out, after, num_inputs, BLOCKS)
        next_scales = _scales(scales_ptr, pitch, at_O, is_out, after, num_inputs, BLOCKS, BLOCKWISE)
        next_x = _inputs(x_ptr, row, after, num_inputs, BLOCKS)
        if BLOCKWISE:
            amax = amax_of_blocks(x, BLOCKWISE)
        x, x_scales = quantised_blocks(x, amax, POWER_OF_TWO)
        products = weight.to(tl.float32) * x.to(tl.float32)[None, :, :]
        sums += tl.sum(products, 2) * (scales * x_scales[None, :])
        weight, scales, x = next_weight, next_scales, next_x
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
    _into_heads[(_programs(num_outputs), num_rows)](
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
        **_whole(weight),
        **early(out_BO.device),
    )
    return out_BO


def gated(x_BD: Tensor, norm_D: Tensor, weight: Fp8Weight, *, eps: float) -> Tensor:
    """[B, I]. `weight`: gate's rows, then up's."""
    (num_rows, width), num_outputs = x_BD.shape, weight.num_outputs // 2
    out_BI = x_BD.new_empty(num_rows, num_outputs)
    _gated[(_programs(num_outputs), num_rows)](
        x_BD,
        norm_D,
        weight.values_OK,
        weight.scales,
        out_BI,
        weight.pitch,
        eps,
        width,
        num_outputs,
        **_whole(weight),
        **early(out_BI.device),
    )
    return out_BI


def added(x_BO: Tensor, inputs_BK: Tensor, weight: Fp8Weight) -> None:
    """Compute x += inputs @ weight.T in place."""
    num_rows, num_outputs = x_BO.shape
    _added[(triton.cdiv(num_outputs, OUTPUTS), num_rows)](
        inputs_BK,
        weight.values_OK,
        weight.scales,
        x_BO,
        weight.pitch,
        inputs_BK.shape[1],
        num_outputs,
        OUTPUTS=OUTPUTS,
        BLOCKS=BLOCKS,
        **options(weight),
        **early(x_BO.device),
    )


def _programs(num_outputs: int) -> int:
    """As many as the device holds at once: each casts the rows once for all of its outputs."""
    return min(triton.cdiv(num_outputs, OUTPUTS), PROGRAMS)


def options(weight: Fp8Weight) -> dict[str, Any]:
    """The flags of a launch that say how numbers are scaled."""
    scaling = weight.scaling
    return {
        "BLOCKWISE": scaling.is_blockwise,
        "POWER_OF_TWO": scaling.has_power_of_two_scales,
    }


def _whole(weight: Fp8Weight) -> dict[str, Any]:
    """The flags of a launch that holds all inputs at once."""
    num_blocks = triton.cdiv(weight.values_OK.shape[1], BLOCK.value)
    return {"OUTPUTS": OUTPUTS, "BLOCKS": triton.next_power_of_2(num_blocks), **options(weight)}
