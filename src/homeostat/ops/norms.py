"""RMS normalisation: x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

Mean and root are computed in fp32 whatever the input dtype; the result has the input dtype. Each
row is computed separately: its bits do not depend on the other rows, nor on its place among them.
To guarantee this, no call does more than one operation per element, whose rounding IEEE 754 fixes:
a fused operation may be rounded differently in the tail of a loop than in its body. rsqrt is a root
and a quotient, each rounded separately, in body and tail (torch.sqrt is not: a vendor's library may
compute it). The sum over a row is torch's, whose order depends only on the row's length.

On CUDA a Triton kernel does it (ops/kernels), together with the residual sum before it. In fp32 on
the CPU, torch's own version is a chain of operations whose gradient needs twice as many passes over
memory as the formula, so the formula is implemented here:

    n = x * rstd,    dx = rstd * (g * w - n * mean(g * w * n)),    dw = sum over rows of g * n

Suffixes: `_D` the normalised dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from homeostat.ops import kernels


def add_rms_norm(x: Tensor, y: Tensor, weight_D: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum of a residual stream and a layer's output, and the norm of that sum."""
    if kernels.fused(x):
        from homeostat.ops.kernels import norms

        if torch.is_grad_enabled():
            return norms.AddRmsNorm.apply(x, y, weight_D, eps)
        return norms.add_rms_norm(x, y, weight_D, eps)[:2]
    x = x + y
    return x, rms_norm(x, weight_D, eps=eps)


def rms_norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """Return the RMS norm of x, multiplied by the weight."""
    if kernels.fused(x):
        from homeostat.ops.kernels import norms

        if torch.is_grad_enabled():
            return norms.RmsNorm.apply(x, weight_D, eps)
        return norms.add_rms_norm(x, None, weight_D, eps)[1]
    # Meta tensors (models/shape_only.py) take this path, too, because it keeps as much as the
    # kernel.
    if x.is_meta or (x.device.type == "cpu" and x.dtype == weight_D.dtype == torch.float32):
        if not torch.is_grad_enabled():
            return (x * _rstd(x, eps)).mul_(weight_D)
        return _RmsNorm.apply(x, weight_D, eps)
    return functional.rms_norm(x, weight_D.shape, weight_D, eps)


def unit_rms(x: Tensor, *, eps: float) -> Tensor:
    """Return the norm before its weight, in fp32, without a gradient."""
    return x * _rstd(x, eps)


def _rstd(x: Tensor, eps: float) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        rstd = _rstd(x, eps)
        normed = x * rstd
        ctx.save_for_backward(normed, weight_D, rstd)
        return normed * weight_D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        normed, weight_D, rstd = ctx.saved_tensors
        (grad,) = grads
        product = grad * normed
        mean = torch.matmul(product, weight_D).unsqueeze(-1).div_(weight_D.shape[0])
        dx = (grad * weight_D).addcmul_(normed, mean, value=-1).mul_(rstd)
        dweight_D = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return dx, dweight_D, None
