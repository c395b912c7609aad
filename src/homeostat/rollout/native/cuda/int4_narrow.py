"""Linear maps of very few rows by packed INT4 weights, bound by reading them: one launch each, with
what comes before and after them.

A program holds a row of inputs in registers, normed where a norm comes first, and goes through
some of the outputs; the weights of the next ones are on their way while it sums. Four bytes are one
word, whose nibbles belong to inputs four apart: the row is read in that order, once. An integer q
becomes the float 24 + q by two operations on bits, because its nibble is moved to the top of the
mantissa of a number between 16 and 32; what that adds to the sums is known from the row.

    into_heads   norm -> q, k and v           three weights, one matrix
    gated        norm -> silu(gate) * up      two weights, one matrix
    added        x += out @ weight.T          in place

Suffixes: `_B` blocks of two groups, `_W` words of a block, `_O` outputs, `_K` inputs.
"""

# Triton compiles its kernels from source: pyright misreads their calls.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.int4_layout import Int4Matrix

# Rows up to which reading the weights costs more than multiplying by them one by one.
MAX_ROWS = 4
# Outputs that a program sums up at a time, words that a thread holds of each, and warps that keep
# the device busy.
OUTPUTS = 4
_WORDS_PER_THREAD = 4
_WARPS = 132 * 24


@triton.jit
def _plane(words, NUMBER: tl.constexpr):
    """24 + q of the integers in a nibble of each word."""
    moved = words << (19 - 4 * NUMBER) if NUMBER < 5 else words >> (4 * NUMBER - 19)
    return ((moved & 0x780000) | 0x41800000).to(tl.float32, bitcast=True)


@triton.jit
def _inputs(x_ptr, norm_ptr, at_B, at_W, place, rstd, num_inputs, HAS_NORM: tl.constexpr,
            GROUP: tl.constexpr):  # fmt: skip
    """Every fourth input of one group of each block: [B, W]."""
    at_K = at_B[:, None] * (2 * GROUP) + place + at_W[None, :] * 4
    is_in = at_K < num_inputs
    x = tl.load(x_ptr + at_K, mask=is_in, other=0.0).to(tl.float32)
    if HAS_NORM:
        norm = tl.load(norm_ptr + at_K, mask=is_in, other=0.0).to(tl.float32)
        x = (x * rstd * norm).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _words(words_ptr, at_O, is_out, at_B, at_W, num_blocks, WORDS: tl.constexpr):
    at = (at_O[:, None].to(tl.int64) * num_blocks + at_B[None, :])[:, :, None] * WORDS
    is_in = is_out[:, None] & (at_B < num_blocks)[None, :]
    return tl.load(words_ptr + at + at_W[None, None, :], mask=is_in[:, :, None], other=0)


@triton.jit
def _scales(scales_ptr, at_O, is_out, at_B, half, num_blocks, num_scales):
    at = (at_B[None, :] * 2 + half).to(tl.int64) * num_scales + at_O[:, None]
    is_in = is_out[:, None] & (at_B < num_blocks)[None, :]
    return tl.load(scales_ptr + at, mask=is_in, other=0.0)


@triton.jit
def _rstd(x_ptr, width, eps, WIDTH: tl.constexpr):
    at_D = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + at_D, mask=at_D < width, other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)


@triton.jit
def _outputs(first, num_outputs, OUTPUTS: tl.constexpr, IS_GATED: tl.constexpr):
    """Rows of the matrix, and which of them exist: those of the gate, then of up beside them."""
    at = tl.arange(0, OUTPUTS)
    if IS_GATED:
        at_O = first + at % (OUTPUTS // 2)
        return at_O + (at // (OUTPUTS // 2)) * num_outputs, at_O < num_outputs
    else:
        return first + at, first + at < num_outputs


@triton.jit
def _store(total, bias_ptr, out_ptr, first, at_O, is_out, num_outputs, OUTPUTS: tl.constexpr,
           HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, IS_ADDED: tl.constexpr):  # fmt: skip
    element = out_ptr.dtype.element_ty
    if IS_GATED:
        gate, up = tl.split(tl.trans(tl.reshape(total, (2, OUTPUTS // 2))))
        gate, up = gate.to(element).to(tl.float32), up.to(element).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
        at_out = first + tl.arange(0, OUTPUTS // 2)
        tl.store(out_ptr + at_out, (activated * up).to(element), mask=at_out < num_outputs)
    else:
        if HAS_BIAS:
            total += tl.load(bias_ptr + at_O, mask=is_out, other=0.0).to(tl.float32)
        out = total.to(element)
        if IS_ADDED:
            so_far = tl.load(out_ptr + at_O, mask=is_out, other=0.0).to(tl.float32)
            out = (so_far + out.to(tl.float32)).to(element)
        tl.store(out_ptr + at_O, out, mask=is_out)


@triton.jit
def _narrow(
    x_ptr, norm_ptr, words_ptr, scales_ptr, bias_ptr, out_ptr, eps, num_inputs, num_blocks,
    num_scales, num_outputs, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr, IS_ADDED: tl.constexpr, GROUP: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    WORDS: tl.constexpr = GROUP // 4
    per_step: tl.constexpr = OUTPUTS // 2 if IS_GATED else OUTPUTS
    at_B, at_W = tl.arange(0, BLOCKS), tl.arange(0, WORDS)
    first, stride = tl.program_id(0) * per_step, tl.num_programs(0) * per_step
    at_O, is_out = _outputs(first, num_outputs, OUTPUTS, IS_GATED)
    words = _words(words_ptr, at_O, is_out, at_B, at_W, num_blocks, WORDS)
    low = _scales(scales_ptr, at_O, is_out, at_B, 0, num_blocks, num_scales)
    high = _scales(scales_ptr, at_O, is_out, at_B, 1, num_blocks, num_scales)
    wait_for_last(EARLY)
    x_ptr += tl.program_id(1) * num_inputs
    out_ptr += tl.program_id(1) * num_outputs
    rstd = _rstd(x_ptr, num_inputs, eps, WIDTH) if HAS_NORM else 1.0
    x0 = _inputs(x_ptr, norm_ptr, at_B, at_W, 0, rstd, num_inputs, HAS_NORM, GROUP)
    x1 = _inputs(x_ptr, norm_ptr, at_B, at_W, 1, rstd, num_inputs, HAS_NORM, GROUP)
    x2 = _inputs(x_ptr, norm_ptr, at_B, at_W, 2, rstd, num_inputs, HAS_NORM, GROUP)
    x3 = _inputs(x_ptr, norm_ptr, at_B, at_W, 3, rstd, num_inputs, HAS_NORM, GROUP)
    y0 = _inputs(x_ptr, norm_ptr, at_B, at_W, GROUP, rstd, num_inputs, HAS_NORM, GROUP)
    y1 = _inputs(x_ptr, norm_ptr, at_B, at_W, GROUP + 1, rstd, num_inputs, HAS_NORM, GROUP)
    y2 = _inputs(x_ptr, norm_ptr, at_B, at_W, GROUP + 2, rstd, num_inputs, HAS_NORM, GROUP)
    y3 = _inputs(x_ptr, norm_ptr, at_B, at_W, GROUP + 3, rstd, num_inputs, HAS_NORM, GROUP)
    less_x, less_y = -24.0 * (x0 + x1 + x2 + x3), -24.0 * (y0 + y1 + y2 + y3)
    for start in range(first, num_outputs, stride):
        # The next outputs' weights are on their way while these are summed up.
        next_O, is_next = _outputs(start + stride, num_outputs, OUTPUTS, IS_GATED)
        next_words = _words(words_ptr, next_O, is_next, at_B, at_W, num_blocks, WORDS)
        next_low = _scales(scales_ptr, next_O, is_next, at_B, 0, num_blocks, num_scales)
        next_high = _scales(scales_ptr, next_O, is_next, at_B, 1, num_blocks, num_scales)
        sums = _plane(words, 0) * x0[None] + less_x[None]
        sums += _plane(words, 2) * x1[None]
        sums += _plane(words, 4) * x2[None]
        sums += _plane(words, 6) * x3[None]
        more = _plane(words, 1) * y0[None] + less_y[None]
        more += _plane(words, 3) * y1[None]
        more += _plane(words, 5) * y2[None]
        more += _plane(words, 7) * y3[None]
        scaled = sums * low.to(tl.float32)[:, :, None] + more * high.to(tl.float32)[:, :, None]
        total = tl.sum(tl.reshape(scaled, (OUTPUTS, BLOCKS * WORDS)), 1)
        _store(
            total, bias_ptr, out_ptr, start, at_O, is_out, num_outputs, OUTPUTS, HAS_BIAS,
            IS_GATED, IS_ADDED,
        )  # fmt: skip
        at_O, is_out, words, low, high = next_O, is_next, next_words, next_low, next_high


def into_heads(
    x_BD: Tensor, norm_D: Tensor, matrix: Int4Matrix, bias_O: Tensor | None, *, eps: float
) -> Tensor:
    """[B, O]: q, k and v of the normed rows, one after the other."""
    out_BO = x_BD.new_empty(len(x_BD), matrix.num_outputs)
    launch(x_BD, matrix, out_BO, norm_D=norm_D, bias_O=bias_O, eps=eps)
    return out_BO


def gated(x_BD: Tensor, norm_D: Tensor, matrix: Int4Matrix, *, eps: float) -> Tensor:
    """[B, I]: silu(gate) * up of the normed rows. The matrix has gate's rows, then up's."""
    out_BI = x_BD.new_empty(len(x_BD), matrix.num_outputs // 2)
    launch(x_BD, matrix, out_BI, norm_D=norm_D, is_gated=True, eps=eps)
    return out_BI


def added(x_BO: Tensor, inputs_BK: Tensor, matrix: Int4Matrix, bias_O: Tensor | None) -> None:
    """Compute x += inputs @ weight.T + bias in place."""
    launch(inputs_BK, matrix, x_BO, bias_O=bias_O, is_added=True)


def launch(
    x_BK: Tensor,
    matrix: Int4Matrix,
    out_BO: Tensor,
    *,
    norm_D: Tensor | None = None,
    bias_O: Tensor | None = None,
    is_gated: bool = False,
    is_added: bool = False,
    eps: float = 0.0,
    outputs: int = OUTPUTS,
    warps: int | None = None,
) -> None:
    """Write the product of each row to `out`, or add it."""
    num_outputs = out_BO.shape[1]
    blocks = triton.next_power_of_2(matrix.num_blocks)
    threads = blocks * matrix.group_size // 4 // _WORDS_PER_THREAD
    warps = warps or min(max(threads // 32, 1), 8)
    steps = triton.cdiv(num_outputs, outputs // 2 if is_gated else outputs)
    # An interpreter computes programs one after the other.
    most = max(1, _WARPS // warps) if out_BO.is_cuda else 2
    _narrow[(min(steps, most), len(x_BK))](
        x_BK,
        x_BK if norm_D is None else norm_D,
        matrix.bytes_OH.view(torch.int32),
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
        OUTPUTS=outputs,
        BLOCKS=blocks,
        WIDTH=triton.next_power_of_2(matrix.num_inputs),
        num_warps=warps,
        **early(out_BO.device),
    )
