"""SiLU gating: silu(gate) * up, with silu(x) = x / (1 + exp(-x)).

torch's SiLU computes the exponential with one routine in the body of a vector loop and with another
in its tail, so the last bit of an entry depends on where the loop ends, that is on the number of
rows and threads. The `invariant` form uses only operations whose result does not depend on the
position: sums and quotients, one per call, whose rounding IEEE 754 fixes, and torch.exp.

IEEE 754 does not guarantee this for torch.exp. torch has two kinds of loops. In most of them a tail
runs through other (scalar) code than the body. The loops of exp, log, sin and cos fill up the last
vector, so they have no tail: these four are the only functions beyond IEEE 754 that invariant
numerics use. sigmoid, silu, pow and everything that fuses two operations would depend on the
position. tests/unit/test_ops_places.py checks this for each instruction set and on aarch64.

On CUDA one Triton kernel (ops/kernels) serves both forms, because all entries go through the same
code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from homeostat.ops import kernels
from homeostat.ops.linear import Numerics


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
