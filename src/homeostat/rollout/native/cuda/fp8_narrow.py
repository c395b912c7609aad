"""Linear maps of very few rows with e4m3 weights: the counterpart of narrow.py at half the bytes.

A program owns some outputs of one row. It reads all their weights before it waits for its inputs,
and sums products of e4m3 numbers in fp32, block by block.

    into_heads   norm -> cast -> q, k and v        one weight of all three
    gated        norm -> cast -> silu(gate) * up   one weight of both
    added        cast -> x += out @ weight.T       in place

Programs cast short inputs themselves, which saves a launch. Long ones are cast by a launch of their
own (fp8_rows.py), because every program would repeat the work.

Inputs are handled in chunks of whole blocks, and within them in groups of 16, which a thread reads
at once and sums up by itself. Loops over chunks are unrolled; a tuple has one entry for each.

Suffixes: `_B` rows, `_D` model dim, `_I` the MLP's inner dim, `_O` outputs, `_K` inputs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels.e4m3 import BLOCK, quantised_blocks
from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.fp8_rows import Fp8Rows, cast_normed, cast_rows
from homeostat.rollout.native.fp8_weights import Fp8Weight

# Inputs that each program casts for itself.
_MAX_REPEATED = 2048
# With fewer outputs, programs have more warps, so that more threads work on each output.
_FEW_OUTPUTS = 2048
# Neighbouring inputs of a thread, and groups of them in a block.
_GROUP, _GROUPS = tl.constexpr(16), tl.constexpr(8)


@triton.jit
def _loaded(at, is_in, IS_WHOLE: tl.constexpr):
    if IS_WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=is_in, other=0.0)


@triton.jit
def _row(x_ptr, num_inputs, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, IS_EVEN: tl.constexpr):
    """Load a row of inputs, [groups, GROUP] for each chunk."""
    at_K = tl.arange(0, BLOCKS * _GROUPS)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    found = ()
    for chunk in tl.static_range(CHUNKS):
        at = chunk * BLOCKS * BLOCK + at_K
        found += (_loaded(x_ptr + at, at < num_inputs, IS_EVEN or chunk < CHUNKS - 1),)
    return found


@triton.jit
def _weights(
    weight_ptr, at_O, num_inputs, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, IS_EVEN: tl.constexpr
):
    """Load the weights of some outputs, [outputs, groups, GROUP] for each chunk."""
    at_K = tl.arange(0, BLOCKS * _GROUPS)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    at_weight = weight_ptr + at_O[:, None, None].to(tl.int64) * num_inputs + at_K[None, :, :]
    found = ()
    for chunk in tl.static_range(CHUNKS):
        first = chunk * BLOCKS * BLOCK
        is_in = (first + at_K < num_inputs)[None, :, :]
        found += (_loaded(at_weight + first, is_in, IS_EVEN or chunk < CHUNKS - 1),)
    return found


@triton.jit
def _scales(
    scales_ptr, stride, num_inputs, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr,
    IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Load the scale of each group's block, [groups] for each chunk."""
    at_K, found = tl.arange(0, BLOCKS * _GROUPS) * _GROUP, ()
    for chunk in tl.static_range(CHUNKS):
        at = chunk * BLOCKS * BLOCK + at_K
        at_scale = scales_ptr + at // BLOCK * stride
        found += (_loaded(at_scale, at < num_inputs, IS_EVEN or chunk < CHUNKS - 1),)
    return found


@triton.jit
def _normed(
    x_ptr, norm_ptr, width, eps, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, IS_EVEN: tl.constexpr
):
    """Load a row and norm it, rounded as the module does: [groups, GROUP] for each chunk."""
    x, norm = (
        _row(x_ptr, width, BLOCKS, CHUNKS, IS_EVEN),
        _row(norm_ptr, width, BLOCKS, CHUNKS, IS_EVEN),
    )
    squares = tl.zeros((BLOCKS * _GROUPS, _GROUP), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        squares += x[chunk].to(tl.float32) * x[chunk].to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, 1), 0) / width + eps)
    found = ()
    for chunk in tl.static_range(CHUNKS):
        whole = x[chunk].to(tl.float32) * rstd * norm[chunk].to(tl.float32)
        found += (whole.to(x_ptr.dtype.element_ty),)
    return found


@triton.jit
def _cast(
    x, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, BLOCKWISE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Cast a row. Return e4m3 values [groups, GROUP] and the scales of groups, for each chunk."""
    largest, of_row = (), 0.0
    for chunk in tl.static_range(CHUNKS):
        amax = tl.max(tl.abs(x[chunk].to(tl.float32)), 1)
        if BLOCKWISE:
            of_block = tl.max(tl.reshape(amax, (BLOCKS, _GROUPS)), 1)
            of_block = tl.broadcast_to(of_block[:, None], (BLOCKS, _GROUPS))
            amax = tl.reshape(of_block, (BLOCKS * _GROUPS,))
        else:
            of_row = tl.maximum(of_row, tl.max(amax, 0))
        largest += (amax,)
    values, scales = (), ()
    for chunk in tl.static_range(CHUNKS):
        amax = largest[chunk] if BLOCKWISE else tl.zeros_like(largest[chunk]) + of_row
        one, scale = quantised_blocks(x[chunk].to(tl.float32), amax, POWER_OF_TWO)
        values += (one,)
        scales += (scale,)
    return values, scales


@triton.jit
def _inputs(
    x_ptr, x_scales_ptr, norm_ptr, row, num_inputs, eps, IS_CAST: tl.constexpr,
    HAS_NORM: tl.constexpr, BLOCKWISE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Return a product's inputs in e4m3 [groups, GROUP] and their scales, for each chunk."""
    x_ptr += row.to(tl.int64) * num_inputs
    if IS_CAST:
        values = _row(x_ptr, num_inputs, BLOCKS, CHUNKS, IS_EVEN)
        stride = tl.num_programs(1) if BLOCKWISE else 0
        scales = _scales(x_scales_ptr + row, stride, num_inputs, BLOCKS, CHUNKS, IS_EVEN)
    else:
        if HAS_NORM:
            x = _normed(x_ptr, norm_ptr, num_inputs, eps, BLOCKS, CHUNKS, IS_EVEN)
        else:
            x = _row(x_ptr, num_inputs, BLOCKS, CHUNKS, IS_EVEN)
        values, scales = _cast(x, BLOCKS, CHUNKS, BLOCKWISE, POWER_OF_TWO)
    return values, scales


@triton.jit
def _matrix(
    weight_ptr, scales_ptr, pitch, first, num_inputs, BLOCKWISE: tl.constexpr,
    OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Load the weights of OUTPUTS outputs and their scales.

    BLOCKWISE: scales of 128 x 128 squares, for each chunk; else one scale for each output.
    """
    at_O = first + tl.arange(0, OUTPUTS)
    weights = _weights(weight_ptr, at_O, num_inputs, BLOCKS, CHUNKS, IS_EVEN)
    if BLOCKWISE:
        # All outputs of a program lie in one row of squares.
        at_square = scales_ptr + first // BLOCK * pitch
        scales = _scales(at_square, 1, num_inputs, BLOCKS, CHUNKS, IS_EVEN)
    else:
        scales = (tl.load(scales_ptr + at_O),)
    return weights, scales


@triton.jit
def _product(matrix, x, BLOCKWISE: tl.constexpr, CHUNKS: tl.constexpr):
    """Sum the products of a matrix with a row: [outputs]."""
    weights, scales = matrix[0], matrix[1]
    sums = tl.zeros(weights[0].shape[:2], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        products = weights[chunk].to(tl.float32) * x[0][chunk].to(tl.float32)[None, :, :]
        scale = x[1][chunk] * scales[chunk] if BLOCKWISE else x[1][chunk]
        sums += tl.sum(products, 2) * scale[None, :]
    total = tl.sum(sums, 1)
    return total if BLOCKWISE else total * scales[0]


@triton.jit
def _into_heads(
    x_ptr, x_scales_ptr, norm_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, pitch, eps,
    num_inputs, num_outputs,
    IS_CAST: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCKWISE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr,
    IS_EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    first, row = tl.program_id(0) * OUTPUTS, tl.program_id(1)
    at_O = first + tl.arange(0, OUTPUTS)
    matrix = _matrix(
        weight_ptr, scales_ptr, pitch, first, num_inputs, BLOCKWISE, OUTPUTS, BLOCKS, CHUNKS,
        IS_EVEN,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + at_O).to(tl.float32)
    wait_for_last(EARLY)
    x = _inputs(
        x_ptr, x_scales_ptr, norm_ptr, row, num_inputs, eps, IS_CAST, True, BLOCKWISE,
        POWER_OF_TWO, BLOCKS, CHUNKS, IS_EVEN,
    )  # fmt: skip
    out = _product(matrix, x, BLOCKWISE, CHUNKS)
    if HAS_BIAS:
        out += bias
    tl.store(out_ptr + row * num_outputs + at_O, out.to(out_ptr.dtype.element_ty))


@triton.jit
def _gated(
    x_ptr, x_scales_ptr, norm_ptr, weight_ptr, scales_ptr, out_ptr, pitch, eps, num_inputs,
    num_outputs,
    IS_CAST: tl.constexpr, BLOCKWISE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, IS_EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    first, row = tl.program_id(0) * OUTPUTS, tl.program_id(1)
    gate_matrix = _matrix(
        weight_ptr, scales_ptr, pitch, first, num_inputs, BLOCKWISE, OUTPUTS, BLOCKS, CHUNKS,
        IS_EVEN,
    )  # fmt: skip
    up_matrix = _matrix(
        weight_ptr, scales_ptr, pitch, num_outputs + first, num_inputs, BLOCKWISE, OUTPUTS, BLOCKS,
        CHUNKS, IS_EVEN,
    )  # fmt: skip
    wait_for_last(EARLY)
    x = _inputs(
        x_ptr, x_scales_ptr, norm_ptr, row, num_inputs, eps, IS_CAST, True, BLOCKWISE,
        POWER_OF_TWO, BLOCKS, CHUNKS, IS_EVEN,
    )  # fmt: skip
    element = out_ptr.dtype.element_ty
    gate = _product(gate_matrix, x, BLOCKWISE, CHUNKS).to(element).to(tl.float32)
    up = _product(up_matrix, x, BLOCKWISE, CHUNKS).to(element).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    at = out_ptr + row * num_outputs + first + tl.arange(0, OUTPUTS)
    tl.store(at, (activated * up).to(element))


@triton.jit
def _added(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, out_ptr, pitch, num_inputs, num_outputs,
    IS_CAST: tl.constexpr, BLOCKWISE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, IS_EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    first, row = tl.program_id(0) * OUTPUTS, tl.program_id(1)
    matrix = _matrix(
        weight_ptr, scales_ptr, pitch, first, num_inputs, BLOCKWISE, OUTPUTS, BLOCKS, CHUNKS,
        IS_EVEN,
    )  # fmt: skip
    wait_for_last(EARLY)
    x = _inputs(
        x_ptr, x_scales_ptr, x_ptr, row, num_inputs, 0.0, IS_CAST, False, BLOCKWISE, POWER_OF_TWO,
        BLOCKS, CHUNKS, IS_EVEN,
    )  # fmt: skip
    element = out_ptr.dtype.element_ty
    added = _product(matrix, x, BLOCKWISE, CHUNKS).to(element).to(tl.float32)
    at = out_ptr + row * num_outputs + first + tl.arange(0, OUTPUTS)
    so_far = tl.load(at).to(tl.float32)
    tl.store(at, (so_far + added).to(element))


def into_heads(
    x_BD: Tensor, norm_D: Tensor, weight: Fp8Weight, bias_O: Tensor | None, *, eps: float
) -> Tensor:
    """Return [B, O]: q, k and v of the normed rows, side by side."""
    (num_rows, width), num_outputs = x_BD.shape, weight.num_outputs
    out_BO = x_BD.new_empty(num_rows, num_outputs)
    cast = _cast_if_long(x_BD, norm_D, weight, eps=eps)
    options = _options(weight, is_cast=cast is not None)
    _into_heads[(num_outputs // options["OUTPUTS"], num_rows)](
        *_rows(x_BD, cast),
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
        **options,
        **early(out_BO.device),
    )
    return out_BO


def gated(x_BD: Tensor, norm_D: Tensor, weight: Fp8Weight, *, eps: float) -> Tensor:
    """Return silu(gate) * up, [B, I]. `weight` holds the rows of gate, then those of up."""
    (num_rows, width), num_outputs = x_BD.shape, weight.num_outputs // 2
    out_BI = x_BD.new_empty(num_rows, num_outputs)
    cast = _cast_if_long(x_BD, norm_D, weight, eps=eps)
    options = _options(weight, is_cast=cast is not None)
    _gated[(num_outputs // options["OUTPUTS"], num_rows)](
        *_rows(x_BD, cast),
        norm_D,
        weight.values_OK,
        weight.scales,
        out_BI,
        weight.pitch,
        eps,
        width,
        num_outputs,
        **options,
        **early(out_BI.device),
    )
    return out_BI


def added(x_BO: Tensor, inputs_BK: Tensor, weight: Fp8Weight) -> None:
    """Compute x += inputs @ weight.T in place."""
    num_rows, num_outputs = x_BO.shape
    cast = _cast_if_long(inputs_BK, None, weight, eps=0.0)
    options = _options(weight, is_cast=cast is not None)
    _added[(num_outputs // options["OUTPUTS"], num_rows)](
        *_rows(inputs_BK, cast),
        weight.values_OK,
        weight.scales,
        x_BO,
        weight.pitch,
        inputs_BK.shape[1],
        num_outputs,
        **options,
        **early(x_BO.device),
    )


def _cast_if_long(
    x_BK: Tensor, norm_K: Tensor | None, weight: Fp8Weight, *, eps: float
) -> Fp8Rows | None:
    if x_BK.shape[1] <= _MAX_REPEATED:
        return None
    if norm_K is None:
        return cast_rows(x_BK, weight.scaling)
    return cast_normed(x_BK, None, norm_K, weight.scaling, eps=eps)


def _rows(x_BK: Tensor, cast: Fp8Rows | None) -> tuple[Tensor, Tensor]:
    """Return a launch's inputs and their scales. Inputs that are not cast are passed for both."""
    return (x_BK, x_BK) if cast is None else (cast.values_BK, cast.scales_GB)


def _options(weight: Fp8Weight, *, is_cast: bool) -> dict[str, Any]:
    (num_outputs, num_inputs), scaling = weight.values_OK.shape, weight.scaling
    tile = tile_of(num_outputs, is_cast=is_cast)
    inputs = tile["BLOCKS"] * BLOCK.value
    return {
        "IS_CAST": is_cast,
        "BLOCKWISE": scaling.is_blockwise,
        "POWER_OF_TWO": scaling.has_power_of_two_scales,
        "CHUNKS": triton.cdiv(num_inputs, inputs),
        "IS_EVEN": num_inputs % inputs == 0,
        **tile,
    }


def tile_of(num_outputs: int, *, is_cast: bool) -> dict[str, int]:
    """Return the outputs of a program, the blocks of its chunks, and its warps.

    The fastest on an H200 for shapes of 1.5 B and 8 B.
    """
    if not is_cast:
        return {"OUTPUTS": 4, "BLOCKS": 4, "num_warps": 4}
    if num_outputs < _FEW_OUTPUTS:
        return {"OUTPUTS": 4, "BLOCKS": 8, "num_warps": 8}
    return {"OUTPUTS": 2, "BLOCKS": 8, "num_warps": 4}
