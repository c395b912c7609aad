"""Kernels for single rows of a decoding step, one launch each: embedding and rotations, a sum with
the norm after it, gating.

Everything is computed in fp32 and rounded where the modules of the decoder round.

Suffixes: `_B` sequences, `_D` model dim, `_F` half a head, `_I` the MLP's inner dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last


@triton.jit
def _enter(
    tokens_ptr,
    positions_ptr,
    table_ptr,
    frequencies_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    factor,
    width,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    # In this order, no kernel of this step starts before the previous step has ended, so all of
    # them may read what that step wrote before they wait.
    wait_for_last(EARLY)
    let_next_start(EARLY)
    row = tl.program_id(0)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    at_D = tl.arange(0, WIDTH)
    is_in = at_D < width
    tl.store(
        x_ptr + row * width + at_D, tl.load(table_ptr + token * width + at_D, mask=is_in), is_in
    )
    at_F = tl.arange(0, HALF_PADDED)
    is_in = at_F < HALF
    angles = tl.load(positions_ptr + row).to(tl.float32) * tl.load(frequencies_ptr + at_F, is_in)
    tl.store(cos_ptr + row * HALF + at_F, tl.cos(angles) * factor, is_in)
    tl.store(sin_ptr + row * HALF + at_F, tl.sin(angles) * factor, is_in)


def enter(
    tokens_B: Tensor,
    positions_B: Tensor,
    embedding_VD: Tensor,
    frequencies_F: Tensor,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings [B, D], and cos and sin of the rotations [B, F] in fp32."""
    num_rows, width, half = len(tokens_B), embedding_VD.shape[1], len(frequencies_F)
    x_BD = embedding_VD.new_empty(num_rows, width)
    cos_BF = frequencies_F.new_empty(num_rows, half)
    sin_BF = torch.empty_like(cos_BF)
    _enter[(num_rows,)](
        tokens_B,
        positions_B,
        embedding_VD,
        frequencies_F,
        x_BD,
        cos_BF,
        sin_BF,
        factor,
        width,
        HALF=half,
        HALF_PADDED=triton.next_power_of_2(half),
        WIDTH=triton.next_power_of_2(width),
        **early(x_BD.device),
    )
    return x_BD, cos_BF, sin_BF


@triton.jit
def _add_norm(
    x_ptr,
    added_ptr,
    weight_ptr,
    out_ptr,
    eps,
    width,
    HAS_ADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0)
    at_D = tl.arange(0, WIDTH)
    is_in = at_D < width
    x = tl.load(x_ptr + row * width + at_D, mask=is_in, other=0.0).to(tl.float32)
    if HAS_ADDED:
        x += tl.load(added_ptr + row * width + at_D, mask=is_in, other=0.0).to(tl.float32)
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * width + at_D, rounded, mask=is_in)
        x = rounded.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(weight_ptr + at_D, mask=is_in, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * width + at_D, (x * rstd * weight).to(x_ptr.dtype.element_ty), mask=is_in
    )


def add_norm(x_BD: Tensor, added_BD: Tensor | None, weight_D: Tensor, *, eps: float) -> Tensor:
    """Compute x += added in place. Return the RMS norm of x, [B, D]."""
    num_rows, width = x_BD.shape
    assert added_BD is None or added_BD.is_contiguous(), "rows are read one after the other"
    out_BD = torch.empty_like(x_BD)
    padded = triton.next_power_of_2(width)
    _add_norm[(num_rows,)](
        x_BD,
        x_BD if added_BD is None else added_BD,
        weight_D,
        out_BD,
        eps,
        width,
        HAS_ADDED=added_BD is not None,
        WIDTH=padded,
        num_warps=4 if padded <= 2048 else 8,
        **early(x_BD.device),
    )
    return out_BD


@triton.jit
def _gate(
    gate_ptr,
    up_ptr,
    out_ptr,
    gate_stride,
    up_stride,
    width,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_in = at < width
    element = gate_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=is_in, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    tl.store(out_ptr + row * width + at, (activated * up).to(element), mask=is_in)


def gate(gate_BI: Tensor, up_BI: Tensor) -> Tensor:
    """Return silu(gate) * up. Rows need not be contiguous."""
    num_rows, width = gate_BI.shape
    out_BI = gate_BI.new_empty(num_rows, width)
    tile = 1024
    _gate[(num_rows, triton.cdiv(width, tile))](
        gate_BI,
        up_BI,
        out_BI,
        gate_BI.stride(0),
        up_BI.stride(0),
        width,
        TILE=tile,
        **early(out_BI.device),
    )
    return out_BI
