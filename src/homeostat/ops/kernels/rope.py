"""Rotate queries and keys in one launch, in fp32 inside.

The gradient of a rotation is the inverse rotation (`SIGN` -1), so only the angles are kept.

Suffixes: `_N` tokens, `_H` heads, `_d` head dim, `_F` frequencies (half the head dim).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from homeostat.ops.kernels import block_of, launches, warps_of


class RotateBoth(torch.autograd.Function):
    """The rotation of queries and keys as an autograd function."""

    @staticmethod
    def forward(
        ctx: Any, q_NHd: Tensor, k_NHd: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return rotate_both(q_NHd, k_NHd, cos, sin, sign=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return *rotate_both(*grads, *ctx.saved_tensors, sign=-1), None, None


def rotate_both(
    q_NHd: Tensor, k_NHd: Tensor, cos_N1d: Tensor, sin_N1F: Tensor, *, sign: int
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys. Not differentiable.

    Tokens may be strided (a slice of a joint product), but heads must be contiguous.
    """
    q_NHd, k_NHd = _dense_heads(q_NHd), _dense_heads(k_NHd)
    out_q, out_k = (x.new_empty(x.shape) for x in (q_NHd, k_NHd))
    num_tokens, num_heads, head_dim = q_NHd.shape
    heads, block = block_of(num_heads), block_of(head_dim // 2)
    if launches(q_NHd):
        _rotate[(num_tokens,)](
            q_NHd, k_NHd, out_q, out_k, cos_N1d, sin_N1F,
            q_NHd.stride(0), k_NHd.stride(0), num_heads, k_NHd.shape[1], head_dim // 2,
            SIGN=sign, Q_HEADS=heads, K_HEADS=block_of(k_NHd.shape[1]), BLOCK=block,
            num_warps=warps_of(heads * block),
        )  # fmt: skip
    return out_q, out_k


def _dense_heads(x_NHd: Tensor) -> Tensor:
    """Return a tensor whose heads are contiguous; a dimension of size 1 may have any stride."""
    return x_NHd if x_NHd[:1].is_contiguous() else x_NHd.contiguous()


@triton.jit
def _rotate(
    q_ptr, k_ptr, out_q_ptr, out_k_ptr, cos_ptr, sin_ptr,
    q_stride, k_stride, q_heads, k_heads, half,
    SIGN: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    frequency = tl.arange(0, BLOCK)
    inside = frequency < half
    cos = tl.load(cos_ptr + token * 2 * half + frequency, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + token * half + frequency, mask=inside, other=0.0) * SIGN
    out = token * 2 * half
    _turn(q_ptr + token * q_stride, out_q_ptr + out * q_heads, cos, sin, q_heads, half,
          HEADS=Q_HEADS, BLOCK=BLOCK)  # fmt: skip
    _turn(k_ptr + token * k_stride, out_k_ptr + out * k_heads, cos, sin, k_heads, half,
          HEADS=K_HEADS, BLOCK=BLOCK)  # fmt: skip


@triton.jit
def _turn(x_ptr, out_ptr, cos, sin, num_heads, half, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    head, frequency = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    at = head[:, None] * 2 * half + frequency[None, :]
    inside = (head[:, None] < num_heads) & (frequency[None, :] < half)
    left = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x_ptr + at + half, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, (left * cos - right * sin).to(dtype), mask=inside)
    tl.store(out_ptr + at + half, (right * cos + left * sin).to(dtype), mask=inside)
