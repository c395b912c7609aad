"""Linear maps of very few rows, bound by reading the weights: one launch each, with what comes
before and after them.

A program owns some outputs of one row. It reads their weights before it waits for its inputs, norms
these itself where a norm comes first (a row of them is small, the weights are not), and adds the
bias, or the sum so far, or gates.

    into_heads   norm -> q, k and v           three weights, one launch
    gated        norm -> silu(gate) * up      two weights, one launch
    added        x += out @ weight.T          in place

With adapters (low_rank.py) the first programs of a launch compute A's outputs.

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
from homeostat.rollout.native.cuda.low_rank import (
    EMPTY,
    NO_ADAPTER,
    LowRank,
    rows_of_b,
)

_EMPTY = tl.constexpr(EMPTY)
# Rows up to which reading the weights costs more than multiplying by them one by one.
MAX_ROWS = 4
# A norm's inputs are held at once.
MAX_WIDTH = 4096
# Outputs of a program, and inputs that it multiplies at a time.
OUTPUTS = 4
INPUTS = 1024
# Numbers of `low` are spread over all threads of a program. If there were fewer than threads, each
# warp would read all of them, and that line of the cache is what all programs wait for.
_THREADS = 128


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
def low_row(low_ptr, number, row, LOW_WIDTH: tl.constexpr, RANK: tl.constexpr,
            PADDED_RANK: tl.constexpr):  # fmt: skip
    """[rank]: A x of map `number`, as soon as all of it is there."""
    at_R = tl.arange(0, PADDED_RANK)
    at = low_ptr + row * LOW_WIDTH + number * RANK + at_R
    bits = tl.load(at, mask=at_R < RANK, other=0, volatile=True)
    while tl.min((bits != _EMPTY).to(tl.int32), 0) == 0:
        bits = tl.load(at, mask=at_R < RANK, other=0, volatile=True)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def low_part(
    out, b, low_ptr, place, number, row, scale, element: tl.constexpr, LOW_WIDTH: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, LOWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Return the outputs with the adapter's part of map `number`. Programs of A's outputs
    (`place` < LOWS) leave them instead."""
    if place < LOWS:
        bits = out.to(element).to(tl.float32).to(tl.int32, bitcast=True)
        tl.store(low_ptr + row * LOW_WIDTH + place + tl.arange(0, OUTPUTS), bits)
    else:
        low_R = low_row(low_ptr, number, row, LOW_WIDTH, RANK, PADDED_RANK)
        out += scale * tl.sum(b.to(tl.float32) * low_R[None, :], 1)
    return out


@triton.jit
def empty_row(next_ptr, place, row, LOW_WIDTH: tl.constexpr):
    """Empty a row of the next product's `low`, if this program is A's first."""
    if LOW_WIDTH > 0:
        if place == 0:
            for first in tl.static_range(0, LOW_WIDTH, 64):
                at = next_ptr + row * LOW_WIDTH + first + tl.arange(0, 64)
                tl.store(at, tl.full((64,), _EMPTY, tl.int32))


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
    a_ptr,
    b_ptr,
    low_ptr,
    next_ptr,
    eps,
    scale,
    width,
    num_q,
    num_kv,
    HAS_BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
    LOW_WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    LOWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    place, row = tl.program_id(0) * OUTPUTS, tl.program_id(1)
    first, number = place - LOWS, 0
    # The sizes are multiples of OUTPUTS: a program's outputs are all of one map.
    weight_ptr, bias_ptr, at = q_ptr, q_bias_ptr, first
    if first >= num_q + num_kv:
        weight_ptr, bias_ptr, at, number = v_ptr, v_bias_ptr, first - num_q - num_kv, 2
    elif first >= num_q:
        weight_ptr, bias_ptr, at, number = k_ptr, k_bias_ptr, first - num_q, 1
    if RANK > 0:
        if first < 0:
            weight_ptr, at = a_ptr, place
    at_O, at_all = at + tl.arange(0, OUTPUTS), first + tl.arange(0, OUTPUTS)
    weight = weights_of(weight_ptr, at_O, at_O >= 0, 0, width, WIDTH)
    if RANK > 0:
        b = rows_of_b(b_ptr, at_all, at_all >= 0, RANK, PADDED_RANK)
    wait_for_last(EARLY)
    empty_row(next_ptr, place, row, LOW_WIDTH)
    x = normed_row(x_ptr, norm_ptr, row, width, eps, WIDTH)
    out = tl.sum(weight.to(tl.float32) * x[None, :], 1)
    if RANK > 0:
        out = low_part(
            out, b, low_ptr, place, number, row, scale, out_ptr.dtype.element_ty, LOW_WIDTH, RANK,
            PADDED_RANK, LOWS, OUTPUTS,
        )  # fmt: skip
    if HAS_BIAS:
        out += tl.load(bias_ptr + at_O, mask=at_all >= 0, other=0.0).to(tl.float32)
    at_out = out_ptr + row * (num_q + 2 * num_kv) + at_all
    tl.store(at_out, out.to(out_ptr.dtype.element_ty), mask=at_all >= 0)


@triton.jit
def _gated(
    x_ptr,
    norm_ptr,
    gate_ptr,
    up_ptr,
    out_ptr,
    a_ptr,
    b_ptr,
    low_ptr,
    next_ptr,
    eps,
    scale,
    width,
    num_outputs,
    AHEAD: tl.constexpr,
    LOW_WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    LOWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    place, row = tl.program_id(0) * OUTPUTS, tl.program_id(1)
    at_O = place - LOWS + tl.arange(0, OUTPUTS)
    is_out, at_W = (at_O >= 0) & (at_O < num_outputs), at_O
    if RANK > 0:
        gate_b = rows_of_b(b_ptr, at_O, is_out, RANK, PADDED_RANK)
        up_b = rows_of_b(b_ptr + num_outputs * RANK, at_O, is_out, RANK, PADDED_RANK)
        if place < LOWS:
            gate_ptr, at_W = a_ptr, place + tl.arange(0, OUTPUTS)
    gate_weight = weights_of(gate_ptr, at_W, at_O < num_outputs, 0, width, WIDTH)
    up_weight = weights_of(up_ptr, at_O, is_out, 0, width, WIDTH)
    wait_for_last(EARLY)
    empty_row(next_ptr, place, row, LOW_WIDTH)
    x = normed_row(x_ptr, norm_ptr, row, width, eps, WIDTH)
    element = out_ptr.dtype.element_ty
    gate = tl.sum(gate_weight.to(tl.float32) * x[None, :], 1)
    up = tl.sum(up_weight.to(tl.float32) * x[None, :], 1)
    if RANK > 0:
        gate = low_part(
            gate, gate_b, low_ptr, place, 0, row, scale, out_ptr.dtype.element_ty, LOW_WIDTH, RANK,
            PADDED_RANK, LOWS, OUTPUTS,
        )  # fmt: skip
        if place >= LOWS:
            up_low_R = low_row(low_ptr, 1, row, LOW_WIDTH, RANK, PADDED_RANK)
            up += scale * tl.sum(up_b.to(tl.float32) * up_low_R[None, :], 1)
    gate = gate.to(element).to(tl.float32)
    up = up.to(element).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    tl.store(out_ptr + row * num_outputs + at_O, (activated * up).to(element), mask=is_out)


@triton.jit
def _added(
    x_ptr,
    weight_ptr,
    out_ptr,
    a_ptr,
    b_ptr,
    low_ptr,
    next_ptr,
    scale,
    num_inputs,
    num_outputs,
    AHEAD: tl.constexpr,
    LOW_WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    LOWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    place, row = tl.program_id(0) * OUTPUTS, tl.program_id(1)
    at_O = place - LOWS + tl.arange(0, OUTPUTS)
    is_out, at_W = (at_O >= 0) & (at_O < num_outputs), at_O
    if RANK > 0:
        b = rows_of_b(b_ptr, at_O, is_out, RANK, PADDED_RANK)
        if place < LOWS:
            weight_ptr, at_W = a_ptr, place + tl.arange(0, OUTPUTS)
    is_read = at_O < num_outputs
    weight = weights_of(weight_ptr, at_W, is_read, 0, num_inputs, INPUTS)
    wait_for_last(EARLY)
    empty_row(next_ptr, place, row, LOW_WIDTH)
    sums = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for start in range(0, num_inputs, INPUTS):
        at_K = start + tl.arange(0, INPUTS)
        x = tl.load(x_ptr + row * num_inputs + at_K, mask=at_K < num_inputs, other=0.0)
        sums += weight.to(tl.float32) * x.to(tl.float32)[None, :]
        # Beyond the end nothing is read.
        weight = weights_of(weight_ptr, at_W, is_read, start + INPUTS, num_inputs, INPUTS)
    element = out_ptr.dtype.element_ty
    added = tl.sum(sums, 1)
    if RANK > 0:
        added = low_part(
            added, b, low_ptr, place, 0, row, scale, out_ptr.dtype.element_ty, LOW_WIDTH, RANK,
            PADDED_RANK, LOWS, OUTPUTS,
        )  # fmt: skip
    added = added.to(element).to(tl.float32)
    at = out_ptr + row * num_outputs + at_O
    so_far = tl.load(at, mask=is_out, other=0.0).to(tl.float32)
    tl.store(at, (so_far + added).to(element), mask=is_out)


@dataclass(frozen=True, slots=True)
class HeadMaps:
    """Weights and biases of q, k and v."""

    weights: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor, Tensor, Tensor] | None


def _low(
    weight_OK: Tensor, adapter: LowRank | None
) -> tuple[tuple[Tensor, ...], float, dict[str, int]]:
    """Return a launch's arguments for adapters: tensors, scale and options.

    Without adapters the weight stands for the tensors, which are not read then.
    """
    if adapter is None:
        return (weight_OK,) * 4, 0.0, {**NO_ADAPTER, "LOWS": 0}
    maps = adapter.maps
    # A's rows are padded with zeros to more than a multiple of OUTPUTS.
    lows = triton.cdiv(len(maps.sizes) * maps.rank, OUTPUTS) * OUTPUTS
    tensors, options = (maps.whole_PK, *adapter.tensors()), adapter.options()
    options["PADDED_RANK"] = max(options["PADDED_RANK"], _THREADS)
    return tensors, maps.scale, {**options, "LOWS": lows}


def into_heads(
    x_BD: Tensor,
    norm_D: Tensor,
    maps: HeadMaps,
    *,
    eps: float,
    adapter: LowRank | None = None,
) -> tuple[Tensor, ...]:
    """q, k and v [B, heads * d] of the normed rows: views of one tensor."""
    num_rows, width = x_BD.shape
    sizes = [weight.shape[0] for weight in maps.weights]
    assert all(size % OUTPUTS == 0 for size in sizes), sizes
    out = x_BD.new_empty(num_rows, sum(sizes))
    tensors, scale, options = _low(maps.weights[0], adapter)
    _into_heads[((sum(sizes) + options["LOWS"]) // OUTPUTS, num_rows)](
        x_BD,
        norm_D,
        *maps.weights,
        *(maps.biases or maps.weights),
        out,
        *tensors,
        eps,
        scale,
        width,
        sizes[0],
        sizes[1],
        HAS_BIAS=maps.biases is not None,
        **options,
        OUTPUTS=OUTPUTS,
        WIDTH=triton.next_power_of_2(width),
        **early(out.device),
    )
    return out.split(sizes, dim=1)


def gated(
    x_BD: Tensor,
    norm_D: Tensor,
    gate_ID: Tensor,
    up_ID: Tensor,
    *,
    eps: float,
    adapter: LowRank | None = None,
) -> Tensor:
    num_rows, width = x_BD.shape
    num_outputs = gate_ID.shape[0]
    out_BI = x_BD.new_empty(num_rows, num_outputs)
    tensors, scale, options = _low(gate_ID, adapter)
    _gated[(triton.cdiv(num_outputs + options["LOWS"], OUTPUTS), num_rows)](
        x_BD,
        norm_D,
        gate_ID,
        up_ID,
        out_BI,
        *tensors,
        eps,
        scale,
        width,
        num_outputs,
        **options,
        OUTPUTS=OUTPUTS,
        WIDTH=triton.next_power_of_2(width),
        **early(out_BI.device),
    )
    return out_BI


def added(
    x_BO: Tensor, inputs_BK: Tensor, weight_OK: Tensor, *, adapter: LowRank | None = None
) -> None:
    num_outputs, num_inputs = weight_OK.shape
    tensors, scale, options = _low(weight_OK, adapter)
    _added[(triton.cdiv(num_outputs + options["LOWS"], OUTPUTS), x_BO.shape[0])](
        inputs_BK,
        weight_OK,
        x_BO,
        *tensors,
        scale,
        num_inputs,
        num_outputs,
        **options,
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS,
        **early(x_BO.device),
    )
