"""Passes over the rows of all (token, slot) pairs, which lie by expert: one launch each.

    spread     a token's row to the places of all its pairs
    gated      silu(gate) * up, of rows that hold gate and then up
    gathered   the weighted sum over a token's pairs, in slot order, in fp32, rounded once

The gradient of a weight is a product of the token's upstream gradient g and its expert's output,
g . (W h) = (W^T g) . h. So neither the outputs nor the gated rows h are kept for the backward pass:
with u = W^T g, `gated_gradients` computes from u and the kept gate and up all that comes before the
down projection.

Suffixes: `_N` tokens, `_K` slots, `_D` model dim, `_S` pairs by expert, `_I` width of an expert,
`_J` twice that: gate, then up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import block_of, launches, warps_of

_BLOCK = 2048
# Entries of a tile of rows in the backward pass, which holds five of them at once.
_TILE = 2048


def spread(x_ND: Tensor, place_S: Tensor, *, num_slots: int) -> Tensor:
    """Return [S, D]: each token's row at the places of its pairs."""
    x_ND = x_ND.contiguous()
    num_tokens, width = x_ND.shape
    out_SD = x_ND.new_empty(num_tokens * num_slots, width)
    if launches(out_SD):
        block = block_of(width)
        _spread[(num_tokens,)](
            x_ND, place_S, out_SD, width, SLOTS=num_slots, BLOCK=block, num_warps=warps_of(block)
        )
    return out_SD


def gathered(
    rows_SD: Tensor, place_S: Tensor, weights_NK: Tensor | None, *, num_slots: int
) -> Tensor:
    """Return [N, D]: the weighted sum over each token's pairs; without weights, the sum."""
    num_pairs, width = rows_SD.shape
    out_ND = rows_SD.new_empty(num_pairs // num_slots, width)
    if launches(out_ND):
        block = block_of(width)
        _gathered[(len(out_ND),)](
            rows_SD, place_S, rows_SD if weights_NK is None else weights_NK.contiguous(), out_ND,
            width, IS_WEIGHTED=weights_NK is not None, SLOTS=num_slots, BLOCK=block,
            num_warps=warps_of(block),
        )  # fmt: skip
    return out_ND


def gated(both_SJ: Tensor) -> Tensor:
    """Return [S, I]: silu(gate) * up."""
    num_rows, width = both_SJ.shape[0], both_SJ.shape[1] // 2
    out_SI = both_SJ.new_empty(num_rows, width)
    if launches(out_SI):
        _gated[(triton.cdiv(out_SI.numel(), _BLOCK),)](
            both_SJ, out_SI, out_SI.numel(), width, BLOCK=_BLOCK, num_warps=8
        )
    return out_SI


def gated_gradients(
    back_SI: Tensor, both_SJ: Tensor, order_S: Tensor, weights_NK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up [S, J] and of the weights [N, K], and weight * h [S, I].

    `back_SI` is u: the upstream gradient times the down projection, before the weights.
    """
    num_rows, width = back_SI.shape
    dboth_SJ, scaled_SI = torch.empty_like(both_SJ), torch.empty_like(back_SI)
    dweights_NK = torch.empty_like(weights_NK, memory_format=torch.contiguous_format)
    if launches(back_SI):
        block = block_of(width)
        rows = max(1, _TILE // block)
        _gated_gradients[(triton.cdiv(num_rows, rows),)](
            back_SI, both_SJ, order_S, weights_NK.contiguous(), dboth_SJ, scaled_SI, dweights_NK,
            num_rows, width, ROWS=rows, BLOCK=block, num_warps=warps_of(rows * block),
        )  # fmt: skip
    return dboth_SJ, dweights_NK, scaled_SI


@triton.jit
def _spread(x_ptr, place_ptr, out_ptr, width, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(x_ptr + token * width + column, mask=inside)
    for slot in tl.static_range(SLOTS):
        place = tl.load(place_ptr + token * SLOTS + slot).to(tl.int64)
        tl.store(out_ptr + place * width + column, row, mask=inside)


@triton.jit
def _gathered(
    rows_ptr, place_ptr, weights_ptr, out_ptr, width,
    IS_WEIGHTED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        place = tl.load(place_ptr + token * SLOTS + slot).to(tl.int64)
        row = tl.load(rows_ptr + place * width + column, mask=inside, other=0.0).to(tl.float32)
        if IS_WEIGHTED:
            row *= tl.load(weights_ptr + token * SLOTS + slot)
        total += row
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated(both_ptr, out_ptr, size, width, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    # In a row of gate and up, this many entries before it are up's.
    at_gate = at + at // width * width
    gate = tl.load(both_ptr + at_gate, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + at_gate + width, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_gradients(
    back_ptr, both_ptr, order_ptr, weights_ptr, dboth_ptr, scaled_ptr, dweights_ptr,
    num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_row = row < num_rows
    inside = is_row[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    at_gate = at + (row * width)[:, None]
    pair = tl.load(order_ptr + row, mask=is_row, other=0)
    weight = tl.load(weights_ptr + pair, mask=is_row, other=0.0)[:, None]
    element = scaled_ptr.dtype.element_ty
    back = tl.load(back_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(both_ptr + at_gate, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + at_gate + width, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    # Rounded as in the forward pass, whose outputs the weights multiplied.
    gated = (silu * up).to(element).to(tl.float32)
    tl.store(dweights_ptr + pair, tl.sum(back * gated, 1), mask=is_row)
    tl.store(scaled_ptr + at, (gated * weight).to(element), mask=inside)
    grad = back * weight
    dgate = grad * up * (share + silu * (1.0 - share))
    tl.store(dboth_ptr + at_gate, dgate.to(element), mask=inside)
    tl.store(dboth_ptr + at_gate + width, (grad * silu).to(element), mask=inside)
