"""RMS normalisation fused with the residual sum before it.

    sum = x + y (rounded, as it is stored),    n = sum * rstd,    out = n * weight
    dsum = rstd * (g * w - n * mean(g * w * n)) + carry,          dw = sum over rows of g * n

`carry` is the gradient that reaches the sum through the residual stream, past the norm. The
gradient of the weight is summed in fp32: each program adds up its rows, and the sums of the
programs are added afterwards, in order.

Suffixes: `_N` rows, `_D` the normalised dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from homeostat.ops.kernels import block_of, launches, num_programs, warps_of

# Several short rows (heads) share a tile.
_TILE = 2048


class AddRmsNorm(torch.autograd.Function):
    """(x + y, its norm) as an autograd function."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, normed, rstd_N = add_rms_norm(x, y, weight_D, eps)
        ctx.save_for_backward(total, weight_D, rstd_N)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        carry, grad = grads
        dsum, dweight_D = _gradients(ctx, grad, carry, needs_weight=ctx.needs_input_grad[2])
        return dsum, dsum, dweight_D, None


class RmsNorm(torch.autograd.Function):
    """RMS normalisation as an autograd function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x, normed, rstd_N = add_rms_norm(x, None, weight_D, eps)
        ctx.save_for_backward(x, weight_D, rstd_N)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        dx, dweight_D = _gradients(ctx, grads[0], None, needs_weight=ctx.needs_input_grad[1])
        return dx, dweight_D, None


def add_rms_norm(
    x: Tensor, y: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x + y, its norm, 1 / rms of each row); without `y`, x itself. Not differentiable."""
    x = x.contiguous()
    total = x if y is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    size = weight_D.shape[0]
    num_rows = x.numel() // size
    rstd_N = x.new_empty(num_rows, dtype=torch.float32)
    rows, block = _tile(size)
    if launches(x):
        _forward[(triton.cdiv(num_rows, rows),)](
            x, x if y is None else y.contiguous(), weight_D, total, normed, rstd_N,
            num_rows, size, eps,
            HAS_Y=y is not None, ROWS=rows, BLOCK=block, num_warps=warps_of(rows * block),
        )  # fmt: skip
    return total, normed, rstd_N


def _gradients(
    ctx: Any, grad: Tensor, carry: Tensor | None, *, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    total, weight_D, rstd_N = ctx.saved_tensors
    size, num_rows = weight_D.shape[0], rstd_N.shape[0]
    dsum = torch.empty_like(total)
    rows, block = _tile(size)
    programs = max(1, min(num_programs(total.device), triton.cdiv(num_rows, rows)))
    # A program without rows writes nothing, so its result is set to zero beforehand.
    sums_PD = total.new_zeros((programs, size) if needs_weight else (1, 1), dtype=torch.float32)
    # Rows of a gradient may be part of wider ones.
    grad = grad if grad.ndim == 2 and grad.stride(1) == 1 else grad.contiguous()
    stride = grad.stride(0) if grad.ndim == 2 else size
    if launches(total):
        _backward[(programs,)](
            grad, grad if carry is None else carry.contiguous(), total, weight_D, rstd_N, dsum,
            sums_PD, num_rows, size, stride, triton.cdiv(num_rows, programs * rows) * rows,
            HAS_CARRY=carry is not None, NEEDS_WEIGHT=needs_weight, ROWS=rows, BLOCK=block,
            num_warps=warps_of(rows * block),
        )  # fmt: skip
    return dsum, sums_PD.sum(0).to(weight_D.dtype) if needs_weight else None


def _tile(size: int) -> tuple[int, int]:
    """Return rows and columns of a tile; the bits of a row depend only on its length."""
    block = block_of(size)
    return max(1, _TILE // block), block


@triton.jit(do_not_specialize=["num_rows"])
def _forward(
    x_ptr, y_ptr, weight_ptr, total_ptr, normed_ptr, rstd_ptr,
    num_rows, size, eps,
    HAS_Y: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * size + column[None, :]
    inside = (row[:, None] < num_rows) & (column[None, :] < size)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_Y:
        x += tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        stored = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, stored, mask=inside)
        x = stored.to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / size + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < num_rows)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    normed = x * rstd[:, None] * weight[None, :]
    tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_ptr, carry_ptr, total_ptr, weight_ptr, rstd_ptr, dsum_ptr, sums_ptr,
    num_rows, size, grad_stride, rows_each,
    HAS_CARRY: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, rows_each, ROWS):
        row = program * rows_each + start + tl.arange(0, ROWS)
        at = row[:, None] * size + column[None, :]
        inside = (row[:, None] < num_rows) & (column[None, :] < size)
        at_grad = row[:, None] * grad_stride + column[None, :]
        grad = tl.load(grad_ptr + at_grad, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < num_rows, other=0.0)
        n = tl.load(total_ptr + at, mask=inside, other=0.0).to(tl.float32) * rstd[:, None]
        scaled = grad * weight[None, :]
        mean = tl.sum(scaled * n, 1) / size
        dsum = rstd[:, None] * (scaled - n * mean[:, None])
        if HAS_CARRY:
            dsum += tl.load(carry_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dsum_ptr + at, dsum.to(dsum_ptr.dtype.element_ty), mask=inside)
        if NEEDS_WEIGHT:
            dweight += grad * n
    if NEEDS_WEIGHT:
        # Sum once after the loop, because a sum over rows is a reduction over threads.
        tl.store(sums_ptr + program * size + column, tl.sum(dweight, 0), mask=column < size)
