"""Rows of activations cast to e4m3, with the norm before them where there is one.

Suffixes: `_B` rows, `_D` model dim, `_K` inputs, `_G` blocks of inputs that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels.e4m3 import BLOCK, amax_of_blocks, quantised_blocks
from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.fp8_weights import Scaling

# Blocks of a program that casts a part of a row.
_PART = 8


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows in e4m3. Scales are stored block by block, the order in which products read them."""

    values_BK: Tensor
    scales_GB: Tensor


@triton.jit
def _cast(
    x_ptr, added_ptr, norm_ptr, out_ptr, scales_ptr, eps, width, num_rows, x_stride,
    HAS_ADDED: tl.constexpr, HAS_NORM: tl.constexpr, BLOCKWISE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    row, at_G = tl.program_id(0), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at_D = at_G[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_in = at_D < width
    element = x_ptr.dtype.element_ty
    if HAS_NORM:
        norm = tl.load(norm_ptr + at_D, mask=is_in, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    at_x = x_ptr + row.to(tl.int64) * x_stride + at_D
    x = tl.load(at_x, mask=is_in, other=0.0).to(tl.float32)
    if HAS_ADDED:
        x += tl.load(added_ptr + row * width + at_D, mask=is_in, other=0.0).to(tl.float32)
        rounded = x.to(element)
        tl.store(at_x, rounded, mask=is_in)
        x = rounded.to(tl.float32)
    if HAS_NORM:
        rstd = 1.0 / tl.sqrt(tl.sum(tl.sum(x * x, 1), 0) / width + eps)
        x = (x * rstd * norm).to(element).to(tl.float32)
    values, scales = quantised_blocks(x, amax_of_blocks(x, BLOCKWISE), POWER_OF_TWO)
    tl.store(out_ptr + row * width + at_D, values, mask=is_in)
    is_scale = (at_G * BLOCK < width) if BLOCKWISE else (at_G < 1)
    tl.store(scales_ptr + at_G * num_rows + row, scales, mask=is_scale)


def cast_rows(x_BK: Tensor, scaling: Scaling) -> Fp8Rows:
    """Cast rows. They need not be contiguous."""
    return _launch(x_BK, None, None, scaling, eps=0.0)


def cast_normed(
    x_BD: Tensor, added_BD: Tensor | None, norm_D: Tensor, scaling: Scaling, *, eps: float
) -> Fp8Rows:
    """Compute x += added in place; return the RMS norm of x, cast."""
    return _launch(x_BD, added_BD, norm_D, scaling, eps=eps)


def empty_rows(num_rows: int, width: int, scaling: Scaling, device: torch.device) -> Fp8Rows:
    """Return memory for rows that a kernel casts."""
    num_blocks = triton.cdiv(width, BLOCK.value) if scaling.is_blockwise else 1
    return Fp8Rows(
        torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(num_blocks, num_rows, dtype=torch.float32, device=device),
    )


def _launch(
    x_BK: Tensor,
    added_BK: Tensor | None,
    norm_K: Tensor | None,
    scaling: Scaling,
    *,
    eps: float,
) -> Fp8Rows:
    num_rows, width = x_BK.shape
    assert added_BK is None or added_BK.is_contiguous(), "rows are read one after the other"
    out = empty_rows(num_rows, width, scaling, x_BK.device)
    num_blocks = triton.cdiv(width, BLOCK.value)
    blocks = triton.next_power_of_2(num_blocks)
    if norm_K is None and scaling.is_blockwise:
        # Nothing is computed over the whole row.
        blocks = min(blocks, _PART)
    _cast[(num_rows, triton.cdiv(num_blocks, blocks))](
        x_BK,
        x_BK if added_BK is None else added_BK,
        x_BK if norm_K is None else norm_K,
        out.values_BK,
        out.scales_GB,
        eps,
        width,
        num_rows,
        x_BK.stride(0),
        HAS_ADDED=added_BK is not None,
        HAS_NORM=norm_K is not None,
        BLOCKWISE=scaling.is_blockwise,
        POWER_OF_TWO=scaling.has_power_of_two_scales,
        BLOCKS=blocks,
        num_warps=4 if blocks <= 16 else 8,
        **early(x_BK.device),
    )
    return out
