"""Linear maps of very few rows, bound by reading the weights: one launch each, which includes the
norm before and the sum or gating after a map.

A program owns some outputs of one row. It reads their weights before it waits for its inputs. If a
norm comes first, every program computes it again, because a row is small compared to the weights.
At the end it adds the bias or the residual, or gates.

    into_heads   norm -> q, k and v           three weights, one launch
    gated        norm -> silu(gate) * up      two weights, one launch
    added        x += out @ weight.T          in place

With adapters (low_rank.py) the first programs of a launch compute A's outputs.

Suffixes: `_B` rows, `_D` model dim, `_I` the MLP's inner dim, `_O` outputs, `_K` inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.low_rank import MAX_PARTS, LowRank
from homeostat.rollout.native.cuda.narrow_rows import (
    asked_low,
    columns_of_b,
    empty_row,
    leave_low,
    low_row,
    row_and_norm,
    sums_of_threads,
    weights_of,
)

# Up to so many rows, reading the weights costs more than multiplying row by row.
MAX_ROWS = 4
# The widest row that a norm can hold in registers.
MAX_WIDTH = 4096
# Outputs of a program, and the inputs that it multiplies at a time.
OUTPUTS = 4
INPUTS = 1024
# Threads of a program, and inputs that each of them reads at once.
_THREADS, _NEIGHBOURS = 128, 8


@triton.jit
def _added_pairs(gate, up, other_gate, other_up):
    return gate + other_gate, up + other_up


@triton.jit
def _into_heads(
    x_ptr, norm_ptr, q_ptr, k_ptr, v_ptr, q_bias_ptr, k_bias_ptr, v_bias_ptr, out_ptr,
    a_ptr, b_ptr, low_ptr, next_ptr, eps, scale, width, num_q, num_kv,
    HAS_BIAS: tl.constexpr, LOW_WIDTH: tl.constexpr, PART: tl.constexpr, RANK: tl.constexpr,
    LOWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, THREADS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
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
    if HAS_BIAS:
        bias = tl.load(bias_ptr + at_O, mask=at_all >= 0, other=0.0).to(tl.float32)
    if RANK > 0:
        b = columns_of_b(b_ptr, at_all, at_all >= 0, 0, RANK, 1, THREADS)
    wait_for_last(EARLY)
    empty_row(next_ptr, place, row, LOWS, LOW_WIDTH, PART)
    if RANK > 0:
        asked = asked_low(low_ptr, number * RANK, row, RANK, LOW_WIDTH, PART, 1, THREADS)
    x, norm = row_and_norm(x_ptr, norm_ptr, row, width, WIDTH)
    element = out_ptr.dtype.element_ty
    is_low = place < LOWS if RANK > 0 else False
    if is_low:
        sums = sums_of_threads(weight, x * norm, THREADS, NEIGHBOURS)
        leave_low(sums, low_ptr, place, 0, row, element, LOW_WIDTH, PART)
    else:
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
        sums = sums_of_threads(weight, (x * rstd * norm).to(element), THREADS, NEIGHBOURS)
        if RANK > 0:
            low = low_row(asked, element)
            sums += b * (low * (scale * rstd))[None, :]
        out = tl.sum(sums, 1)
        if HAS_BIAS:
            out += bias
        tl.store(out_ptr + row * (num_q + 2 * num_kv) + at_all, out.to(element))


@triton.jit
def _gated(
    x_ptr, norm_ptr, gate_ptr, up_ptr, out_ptr, a_ptr, b_ptr, low_ptr, next_ptr, eps, scale, width,
    num_outputs, LOW_WIDTH: tl.constexpr, PART: tl.constexpr, RANK: tl.constexpr,
    LOWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, THREADS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    place, row = tl.program_id(0) * OUTPUTS, tl.program_id(1)
    at_O = place - LOWS + tl.arange(0, OUTPUTS)
    is_out, at_W = (at_O >= 0) & (at_O < num_outputs), at_O
    if RANK > 0:
        gate_b = columns_of_b(b_ptr, at_O, is_out, 0, RANK, 1, THREADS)
        up_b = columns_of_b(b_ptr + num_outputs * RANK, at_O, is_out, 1, RANK, 1, THREADS)
        if place < LOWS:
            gate_ptr, at_W = a_ptr, place + tl.arange(0, OUTPUTS)
    gate_weight = weights_of(gate_ptr, at_W, at_O < num_outputs, 0, width, WIDTH)
    up_weight = weights_of(up_ptr, at_O, is_out, 0, width, WIDTH)
    wait_for_last(EARLY)
    empty_row(next_ptr, place, row, LOWS, LOW_WIDTH, PART)
    if RANK > 0:
        asked = asked_low(low_ptr, 0, row, 2 * RANK, LOW_WIDTH, PART, 1, THREADS)
    x, norm = row_and_norm(x_ptr, norm_ptr, row, width, WIDTH)
    element = out_ptr.dtype.element_ty
    is_low = place < LOWS if RANK > 0 else False
    if is_low:
        sums = sums_of_threads(gate_weight, x * norm, THREADS, NEIGHBOURS)
        leave_low(sums, low_ptr, place, 0, row, element, LOW_WIDTH, PART)
    else:
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
        normed = (x * rstd * norm).to(element)
        gates = sums_of_threads(gate_weight, normed, THREADS, NEIGHBOURS)
        ups = sums_of_threads(up_weight, normed, THREADS, NEIGHBOURS)
        if RANK > 0:
            low = low_row(asked, element)
            low *= scale * rstd
            gates += gate_b * low[None, :]
            ups += up_b * low[None, :]
        gate, up = tl.reduce((gates, ups), 1, _added_pairs)
        gate = gate.to(element).to(tl.float32)
        up = up.to(element).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
        tl.store(out_ptr + row * num_outputs + at_O, (activated * up).to(element), mask=is_out)


@triton.jit
def _added(
    x_ptr, weight_ptr, out_ptr, a_ptr, b_ptr, low_ptr, next_ptr, scale, num_inputs, num_outputs,
    LOW_WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    LOWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, THREADS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    place, row, part = tl.program_id(0) * OUTPUTS, tl.program_id(1), 0
    is_low = place < PARTS * LOWS if RANK > 0 else False
    at_O = place - PARTS * LOWS + tl.arange(0, OUTPUTS)
    is_out, at_W, first, end = (at_O >= 0) & (at_O < num_outputs), at_O, 0, num_inputs
    if RANK > 0:
        b = columns_of_b(b_ptr, at_O, is_out, 0, RANK, PARTS, THREADS)
        if is_low:
            part, weight_ptr = place // LOWS, a_ptr
            at_W = place % LOWS + tl.arange(0, OUTPUTS)
            per_part = tl.cdiv(tl.cdiv(num_inputs, INPUTS), PARTS) * INPUTS
            first = part * per_part
            end = tl.minimum(first + per_part, num_inputs)
    is_read = at_O < num_outputs
    weight = weights_of(weight_ptr, at_W, is_read, first, num_inputs, INPUTS)
    wait_for_last(EARLY)
    empty_row(next_ptr, place, row, PARTS * LOWS, LOW_WIDTH, PART)
    at = out_ptr + row * num_outputs + at_O
    so_far = tl.load(at, mask=is_out, other=0.0).to(tl.float32)
    sums = tl.zeros((OUTPUTS, THREADS), tl.float32)
    for start in range(first, end, INPUTS):
        at_K = start + tl.arange(0, INPUTS)
        x = tl.load(x_ptr + row * num_inputs + at_K, mask=at_K < num_inputs, other=0.0)
        sums += sums_of_threads(weight, x, THREADS, NEIGHBOURS)
        # This reads nothing beyond the end.
        weight = weights_of(weight_ptr, at_W, is_read, start + INPUTS, num_inputs, INPUTS)
    element = out_ptr.dtype.element_ty
    if is_low:
        leave_low(sums, low_ptr, place % LOWS, part, row, element, LOW_WIDTH, PART)
    else:
        if RANK > 0:
            asked = asked_low(low_ptr, 0, row, RANK, LOW_WIDTH, PART, PARTS, THREADS)
            low = low_row(asked, element)
            sums += b * (low * scale)[None, :]
        added = tl.sum(sums, 1).to(element).to(tl.float32)
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

    Without adapters the weight is passed in place of the tensors, which are then not read.
    """
    if adapter is None:
        return (weight_OK,) * 4, 0.0, {"LOW_WIDTH": 0, "PART": 0, "RANK": 0, "LOWS": 0}
    maps, (_, max_rows, width) = adapter.maps, adapter.low_NBW.shape
    # A's rows are padded with zeros to more than a multiple of OUTPUTS.
    lows = triton.cdiv(len(maps.sizes) * maps.rank, OUTPUTS) * OUTPUTS
    tensors = (maps.whole_PK, *adapter.tensors())
    options = {"LOW_WIDTH": width, "PART": max_rows * width, "RANK": maps.rank, "LOWS": lows}
    return tensors, maps.scale, options


def _threads(inputs: int, num_columns: int) -> dict[str, int]:
    """Return how many threads sum up inputs, and how many neighbouring ones each reads at once.

    The same threads sum up `num_columns` columns of B.
    """
    threads = triton.next_power_of_2(max(min(inputs, _THREADS), num_columns))
    return {"THREADS": threads, "NEIGHBOURS": min(max(inputs // threads, 1), _NEIGHBOURS)}


def _padded(width: int, num_columns: int) -> dict[str, int]:
    inputs = triton.next_power_of_2(max(width, num_columns))
    return {"WIDTH": inputs, **_threads(inputs, num_columns)}


def into_heads(
    x_BD: Tensor,
    norm_D: Tensor,
    maps: HeadMaps,
    *,
    eps: float,
    adapter: LowRank | None = None,
) -> tuple[Tensor, ...]:
    """Return q, k and v [B, heads * d] of the normed rows, as views of one tensor."""
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
        **_padded(width, options["RANK"]),
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
        **_padded(width, 2 * options["RANK"]),
        **early(out_BI.device),
    )
    return out_BI


def added(
    x_BO: Tensor, inputs_BK: Tensor, weight_OK: Tensor, *, adapter: LowRank | None = None
) -> None:
    num_outputs, num_inputs = weight_OK.shape
    tensors, scale, options = _low(weight_OK, adapter)
    rank, parts = options["RANK"], triton.cdiv(num_inputs, INPUTS)
    parts = max(min(parts, MAX_PARTS, _THREADS // max(rank, 1)), 1)
    _added[(triton.cdiv(num_outputs + parts * options["LOWS"], OUTPUTS), x_BO.shape[0])](
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
        PARTS=parts,
        **_threads(INPUTS, parts * rank),
        **early(x_BO.device),
    )
