"""Compute silu(gate) * up in one pass each way. Only gate and up are kept.

s = sigmoid(gate),   out = gate * s * up
dgate = g * up * s * (1 + gate * (1 - s)),   dup = g * gate * s
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from homeostat.ops.kernels import launches

_BLOCK = 1024


class GatedSilu(torch.autograd.Function):
    """silu(gate) * up as an autograd function."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gated_silu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        gate, up = (x.contiguous() for x in ctx.saved_tensors)
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        if launches(gate):
            _backward[_grid(gate)](
                grads[0].contiguous(), gate, up, dgate, dup, gate.numel(), BLOCK=_BLOCK
            )
        return dgate, dup


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up. Not differentiable."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if launches(gate):
        _forward[_grid(gate)](gate, up, out, gate.numel(), BLOCK=_BLOCK)
    return out


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), _BLOCK),)


@triton.jit
def _forward(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=at < size)


@triton.jit
def _backward(grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    dgate = grad * up * (share + silu * (1.0 - share))
    tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=at < size)
    tl.store(dup_ptr + at, (grad * silu).to(dup_ptr.dtype.element_ty), mask=at < size)
