"""Gating: act(gate) * up, where act is SiLU or the tanh approximation of GELU.

    silu(x) = x / (1 + exp(-x))
    gelu_tanh(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))

torch's SiLU computes the exponential with one routine in the body of a vector loop and with another
in its tail, so the last bit of an entry depends on where the loop ends, that is on the number of
rows and threads. The `invariant` form uses only operations whose result does not depend on the
position: sums and quotients, one per call, whose rounding IEEE 754 fixes, and torch.exp.

IEEE 754 does not guarantee this for torch.exp. torch has two kinds of loops. In most of them a tail
runs through other (scalar) code than the body. The loops of exp, log, sin and cos fill up the last
vector, so they have no tail: these four are the only functions beyond IEEE 754 that invariant
numerics use. sigmoid, silu, pow and everything that fuses two operations would depend on the
position. tests/unit/test_ops_places.py checks this for each instruction set and on aarch64.

On CUDA one Triton kernel (ops/kernels) serves both forms of SiLU, because all entries go through
the same code. GELU has no kernel: torch computes it, in invariant form as here.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from homeostat.ops import kernels
from homeostat.ops.linear import Numerics

Activation = Literal["silu", "gelu_tanh"]

# Below this size a polynomial is exact to fp32; above it the formula by exp is.
_SMALL = 0.25


def gated(gate: Tensor, up: Tensor, *, activation: Activation, numerics: Numerics) -> Tensor:
    """Return act(gate) * up."""
    if activation == "silu":
        return gated_silu(gate, up, numerics=numerics)
    if numerics == "fast":
        return functional.gelu(gate, approximate="tanh") * up
    return _InvariantGelu.apply(gate) * up


def gated_silu(gate: Tensor, up: Tensor, *, numerics: Numerics = "fast") -> Tensor:
    """Return silu(gate) * up."""
    if kernels.fused(gate):
        from homeostat.ops.kernels import activations

        if torch.is_grad_enabled():
            return activations.GatedSilu.apply(gate, up)
        return activations.gated_silu(gate, up)
    activated = functional.silu(gate) if numerics == "fast" else _InvariantSilu.apply(gate)
    return activated * up


class _InvariantSilu(torch.autograd.Function):
    """Use torch's own gradient: the formula gives inf / inf for large negative inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x / x.neg().exp_().add_(1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return torch.ops.aten.silu_backward(grads[0], *ctx.saved_tensors)


class _InvariantGelu(torch.autograd.Function):
    """The tanh approximation of GELU, with torch's own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        cubic = (wide * wide).mul_(wide).mul_(0.044715)
        inner = cubic.add_(wide).mul_(math.sqrt(2 / math.pi))
        return invariant_tanh(inner).add_(1.0).mul_(wide).mul_(0.5).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return torch.ops.aten.gelu_backward(grads[0], *ctx.saved_tensors, approximate="tanh")


def invariant_tanh(x: Tensor) -> Tensor:
    """Return tanh(x) by exp and rational operations, whose bits do not depend on the position.

    Near 0 the formula 1 - 2 / (exp(2x) + 1) cancels, so that its Taylor series is used there.
    """
    square = x * x
    series = square * (62 / 2835)
    for coefficient in (-17 / 315, 2 / 15, -1 / 3, 1.0):
        series = series.add_(coefficient)
        series = series.mul_(square) if coefficient != 1.0 else series.mul_(x)
    far = torch.full_like(x, -2.0).div_((x * 2.0).exp_().add_(1.0)).add_(1.0)
    return torch.where(x.abs() < _SMALL, series, far)
