"""Linear maps of very few rows, bound by reading the weights: one launch each, with what comes
before and after them.

A program owns some outputs. It norms the inputs itself where a norm comes first (a row of them is
small, the weights are not), and adds the bias, or the sum so far, or gates.

    into_heads   norm -> q, k and v           three weights, one launch
    gated        norm -> silu(gate) * up      two weights, one launch
    added        x += out @ weight.T          in place

Suffixes: `_B` rows, `_D` model dim, `_I` the MLP's inner dim, `_O` outputs, `_K` inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

# Rows up to which reading the weights costs more than multiplying by them one by one.
MAX_ROWS = 4
OUTPUTS = 8
_INPUTS = 512


@triton.jit
def _rstd(x_ptr, row, num_inputs, eps, INPUTS: tl.constexpr):
    squares = tl.zeros((INPUTS,), tl.float32)
    for start in range(0, num_inputs, INPUTS):
        at_K = start + tl.arange(0, INPUTS)
        x = tl.load(x_ptr + row * num_inputs + at_K, mask=at_K < num_inputs, other=0.0)
        x = x.to(tl.float32)
        squares += x * x
    return 1.0 / tl.sqrt(tl.sum(squares, 0) / num_inputs + eps)


@triton.jit
def _product(
    x_ptr,
    row,
    norm_ptr,
    rstd,
    weight_ptr,
    at_O,
    is_out,
    num_inputs,
    HAS_NORM: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """fp32 [OUTPUTS]: weight[at_O] @ x[row], normed first where it is asked for."""
    sums = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for start in range(0, num_inputs, INPUTS):
        at_K = start + tl.arange(0, INPUTS)
        is_in = at_K < num_inputs
        weight = tl.load(
            weight_ptr + at_O[:, None].to(tl.int64) * num_inputs + at_K[None, :],
            mask=is_out[:, None] & is_in[None, :],
            other=0.0,
        )
        x = tl.load(x_ptr + row * num_inputs + at_K, mask=is_in, other=0.0).to(tl.float32)
        if HAS_NORM:
            x = x * rstd * tl.load(norm_ptr + at_K, mask=is_in, other=0.0).to(tl.float32)
            x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
        sums += weight.to(tl.float32) * x[None, :]
    return tl.sum(sums, 1)


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
    num_inputs,
    num_q,
    num_kv,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    first, row = tl.program_id(0) * OUTPUTS, tl.program_id(1)
    # The sizes are multiples of OUTPUTS: a program's outputs are all of one map.
    weight_ptr, bias_ptr, at = q_ptr, q_bias_ptr, first
    if first >= num_q + num_kv:
        weight_ptr, bias_ptr, at = v_ptr, v_bias_ptr, first - num_q - num_kv
    elif first >= num_q:
        weight_ptr, bias_ptr, at = k_ptr, k_bias_ptr, first - num_q
    at_O = at + tl.arange(0, OUTPUTS)
    rstd = _rstd(x_ptr, row, num_inputs, eps, INPUTS)
    is_out = at_O >= 0
    out = _product(
        x_ptr, row, norm_ptr, rstd, weight_ptr, at_O, is_out, num_inputs, True, OUTPUTS, INPUTS
    )
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
    num_inputs,
    num_outputs,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    at_O, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    is_out = at_O < num_outputs
    element = out_ptr.dtype.element_ty
    rstd = _rstd(x_ptr, row, num_inputs, eps, INPUTS)
    gate = _product(
        x_ptr, row, norm_ptr, rstd, gate_ptr, at_O, is_out, num_inputs, True, OUTPUTS, INPUTS
    )
    up = _product(
        x_ptr, row, norm_ptr, rstd, up_ptr, at_O, is_out, num_inputs, True, OUTPUTS, INPUTS
    )
    gate, up = gate.to(element).to(tl.float32), up.to(element).to(tl.float32)
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
):
    at_O, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    is_out = at_O < num_outputs
    element = out_ptr.dtype.element_ty
    added = _product(
        x_ptr, row, x_ptr, 1.0, weight_ptr, at_O, is_out, num_inputs, False, OUTPUTS, INPUTS
    )
    at = out_ptr + row * num_outputs + at_O
    so_far = tl.load(at, mask=is_out, other=0.0).to(tl.float32)
    tl.store(at, (so_far + added.to(element).to(tl.float32)).to(element), mask=is_out)


@dataclass(frozen=True, slots=True)
class HeadMaps:
    """Weights and biases of q, k and v."""

    weights: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor, Tensor, Tensor] | None


def into_heads(x_BD: Tensor, norm_D: Tensor, maps: HeadMaps, *, eps: float) -> tuple[Tensor, ...]:
    """q, k and v [B, heads * d] of the normed rows: views of one tensor."""
    sizes = [weight.shape[0] for weight in maps.weights]
    assert all(size % OUTPUTS == 0 for size in sizes), sizes
    out = x_BD.new_empty(x_BD.shape[0], sum(sizes))
    _into_heads[(sum(sizes) // OUTPUTS, x_BD.shape[0])](
        x_BD,
        norm_D,
        *maps.weights,
        *(maps.biases or maps.weights),
        out,
        eps,
        x_BD.shape[1],
        sizes[0],
        sizes[1],
        HAS_BIAS=maps.biases is not None,
        OUTPUTS=OUTPUTS,
        INPUTS=_INPUTS,
    )
    return out.split(sizes, dim=1)


def gated(x_BD: Tensor, norm_D: Tensor, gate_ID: Tensor, up_ID: Tensor, *, eps: float) -> Tensor:
    num_outputs = gate_ID.shape[0]
    out_BI = x_BD.new_empty(x_BD.shape[0], num_outputs)
    _gated[(triton.cdiv(num_outputs, OUTPUTS), x_BD.shape[0])](
        x_BD,
        norm_D,
        gate_ID,
        up_ID,
        out_BI,
        eps,
        x_BD.shape[1],
        num_outputs,
        OUTPUTS=OUTPUTS,
        INPUTS=_INPUTS,
    )
    return out_BI


def added(x_BO: Tensor, inputs_BK: Tensor, weight_OK: Tensor) -> None:
    num_outputs, num_inputs = weight_OK.shape
    outputs = 4
    _added[(triton.cdiv(num_outputs, outputs), x_BO.shape[0])](
        inputs_BK,
        weight_OK,
        x_BO,
        num_inputs,
        num_outputs,
        OUTPUTS=outputs,
        INPUTS=_INPUTS,
    )
