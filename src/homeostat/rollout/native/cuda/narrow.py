"""Linear maps of very few rows, bound by reading the weights: one launch each, with what comes
before and after them.

A program owns some outputs of one row. It reads their weights before it waits for its inputs, norms
these itself where a norm comes first (a row of them is small, the weights are not), and adds the
bias, or the sum so far, or gates.

    into_heads   norm -> q, k and v           three weights, one launch
    gated        norm -> silu(gate) * up      two weights, one launch
    added        x += out @ weight.T          in place

Suffixes: `_B` rows, `_D` model dim, `_I` the MLP's inner dim, `_O` outputs, `_K` inputs.
"""

# Triton compiles its kernels from source: pyright misreads their calls.
# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last

# Rows up to which reading the weights costs more than multiplying by them one by one.
MAX_ROWS = 4
# A norm's inputs are held at once.
MAX_WIDTH = 4096
# Outputs of a program, and inputs that it multiplies at a time.
OUTPUTS = 4
INPUTS = 1024


@triton.jit
def weights_of(weight_ptr, at_O, is_out, start, num_inputs, INPUTS: tl.constexpr):
    at_K = start + tl.arange(0, INPUTS)
    is_in = is_out[:, None] & (at_K < num_inputs)[None, :]
    at = at_O[:, None].to(tl.int64) * num_inputs + at_K[None, :]
    return tl.load(weight_ptr + at, mask=is_in, other=0.0)


@triton.jit
def normed_row(x_ptr, norm_ptr, row, width, eps, WIDTH: tl.constexpr):
    at_D = tl.arange(0, WIDTH)
    is_in = at_D < width
    x = tl.load(x_ptr + row * width + at_D, mask=is_in, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(norm_ptr + at_D, mask=is_in, other=0.0).to(tl.float32)
    return (x * rstd * weight).to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _into_heads(
    x_ptr,
    norm_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    q_bias_ptr,
    k_bias_ptr,
    v_bias_ptr,
    out_ptr,
    eps,
    width,
    num_q,
    num_kv,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    first, row = tl.program_id(0) * OUTPUTS, tl.program_id(1)
    # The sizes are multiples of OUTPUTS: a program's outputs are all of one map.
    weight_ptr, bias_ptr, at = q_ptr, q_bias_ptr, first
    if first >= num_q + num_kv:
        weight_ptr, bias_ptr, at = v_ptr, v_bias_ptr, first - num_q - num_kv
    elif first >= num_q:
        weight_ptr, bias_ptr, at = k_ptr, k_bias_ptr, first - num_q
    at_O = at + tl.arange(0, OUTPUTS)
    weight = weights_of(weight_ptr, at_O, at_O >= 0, 0, width, WIDTH)
    wait_for_last(EARLY)
    x = normed_row(x_ptr, norm_ptr, row, width, eps, WIDTH)
    out = tl.sum(weight.to(tl.float32) * x[None, :], 1)
    if HAS_BIAS:
        out += tl.load(bias_ptr + at_O).to(tl.float32)
    at_out = out_ptr + row * (num_q + 2 * num_kv) + first + tl.arange(0, OUTPUTS)
    tl.store(at_out, out.to(out_ptr.dtype.element_ty))


@triton.jit
def _gated(
    x_ptr,
    norm_ptr,
    gate_ptr,
    up_ptr,
    out_ptr,
    eps,
    width,
    num_outputs,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    at_O, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    is_out = at_O < num_outputs
    gate_weight = weights_of(gate_ptr, at_O, is_out, 0, width, WIDTH)
    up_weight = weights_of(up_ptr, at_O, is_out, 0, width, WIDTH)
    wait_for_last(EARLY)
    x = normed_row(x_ptr, norm_ptr, row, width, eps, WIDTH)
    element = out_ptr.dtype.element_ty
    gate = tl.sum(gate_weight.to(tl.float32) * x[None, :], 1).to(element).to(tl.float32)
    up = tl.sum(up_weight.to(tl.float32) * x[None, :], 1).to(element).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    tl.store(out_ptr + row * num_outputs + at_O, (activated * up).to(element), mask=is_out)


@triton.jit
def _added(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_inputs,
    num_outputs,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    at_O, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    is_out = at_O < num_outputs
    weight = weights_of(weight_ptr, at_O, is_out, 0, num_inputs, INPUTS)
    wait_for_last(EARLY)
    sums = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for start in range(0, num_inputs, INPUTS):
        at_K = start + tl.arange(0, INPUTS)
        x = tl.load(x_ptr + row * num_inputs + at_K, mask=at_K < num_inputs, other=0.0)
        sums += weight.to(tl.float32) * x.to(tl.float32)[None, :]
        # Beyond the end nothing is read.
        weight = weights_of(weight_ptr, at_O, is_out, start + INPUTS, num_inputs, INPUTS)
    element = out_ptr.dtype.element_ty
    added = tl.sum(sums, 1).to(element).to(tl.float32)
    at = out_ptr + row * num_outputs + at_O
    so_far = tl.load(at, mask=is_out, other=0.0).to(tl.float32)
    tl.store(at, (so_far + added).to(element), mask=is_out)


@dataclass(frozen=True, slots=True)
class HeadMaps:
    """Weights and biases of q, k and v."""

    weights: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor, Tensor, Tensor] | None


def into_heads(x_BD: Tensor, norm_D: Tensor, maps: HeadMaps, *, eps: float) -> tuple[Tensor, ...]:
    """q, k and v [B, heads * d] of the normed rows: views of one tensor."""
    num_rows, width = x_BD.shape
    sizes = [weight.shape[0] for weight in maps.weights]
    assert all(size % OUTPUTS == 0 for size in sizes), sizes
    out = x_BD.new_empty(num_rows, sum(sizes))
    _into_heads[(sum(sizes) // OUTPUTS, num_rows)](
        x_BD,
        norm_D,
        *maps.weights,
        *(maps.biases or maps.weights),
        out,
        eps,
        width,
        sizes[0],
        sizes[1],
        HAS_BIAS=maps.biases is not None,
        OUTPUTS=OUTPUTS,
        WIDTH=triton.next_power_of_2(width),
        **early(out.device),
    )
    return out.split(sizes, dim=1)


def gated(x_BD: Tensor, norm_D: Tensor, gate_ID: Tensor, up_ID: Tensor, *, eps: float) -> Tensor:
    num_rows, width = x_BD.shape
    num_outputs = gate_ID.shape[0]
    out_BI = x_BD.new_empty(num_rows, num_outputs)
    _gated[(triton.cdiv(num_outputs, OUTPUTS), num_rows)](
        x_BD,
        norm_D,
        gate_ID,
        up_ID,
        out_BI,
        eps,
        width,
        num_outputs,
        OUTPUTS=OUTPUTS,
        WIDTH=triton.next_power_of_2(width),
        **early(out_BI.device),
    )
    return out_BI


def added(x_BO: Tensor, inputs_BK: Tensor, weight_OK: Tensor) -> None:
    num_outputs, num_inputs = weight_OK.shape
    _added[(triton.cdiv(num_outputs, OUTPUTS), x_BO.shape[0])](
        inputs_BK,
        weight_OK,
        x_BO,
        num_inputs,
        num_outputs,
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS,
        **early(x_BO.device),
    )
