"""SiLU gating: silu(gate) * up, with silu(x) = x / (1 + exp(-x)).

torch's SiLU takes the exponential by one routine in the body of a vector loop and by another in its
tail, so that an entry's last bit depends on where the loop ends: on the number of rows and threads.
The `invariant` form is built of operations that have one result each: sums and quotients, one per
call, which IEEE 754 rounds one way, and torch.exp.

That torch.exp belongs to these is no law of IEEE 754. torch has two kinds of loops. In most of them
a tail goes through other (scalar) code than the body. Those of exp, log, sin and cos fill the last
vector up, so that they leave no tail: these four are the only functions beyond IEEE 754 that
invariant numerics use. sigmoid, silu, pow and whatever fuses two operations would depend on the
place. tests/unit/test_ops_places.py holds this, by each set of instructions and on aarch64.

On CUDA one Triton kernel (ops/kernels) is both forms: all entries go through the same code.
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
    if kernels.fused(gate):
        from homeostat.ops.kernels import activations

        if torch.is_grad_enabled():
            return activations.GatedSilu.apply(gate, up)
        return activations.gated_silu(gate, up)
    activated = functional.silu(gate) if numerics == "fast" else _InvariantSilu.apply(gate)
    return activated * up


class _InvariantSilu(torch.autograd.Function):
    """torch's own gradient: that of the formula is inf / inf for large negative inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x / x.neg().exp_().add_(1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return torch.ops.aten.silu_backward(grads[0], *ctx.saved_tensors)
