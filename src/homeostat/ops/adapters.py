"""A frozen linear map with a low-rank update (LoRA), forward and backward with few passes.

    y = x W^T + b + scale * low B^T,    low = z A^T,    z = x, or what dropout leaves of it

A rank is small, so that the update costs hardly any arithmetic: its cost are passes over the widest
of x and y. There are two forms of every product, and the one with less traffic is taken:

    summed   the update is added to the finished product: reads and writes the result once more
    joined   one product of [x, scale * low] and [W, B]: copies the inputs, and the weight

So a wide result (gate and up) is written once, and so is a wide gradient of the input (down); the
wide gradient of a result is read once for both its products. Only A and B have gradients
(ops/kernels/thin.py). In `invariant` numerics the plain form stands: each product for itself.

Suffixes: `_M` rows, `_K` inputs, `_O` outputs, `_R` rank, `_J` inputs or outputs and the rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from homeostat.ops import kernels
from homeostat.ops.held import HeldWeight, held_linear
from homeostat.ops.linear import Numerics, linear

# Joined dimensions are multiples of this: a library's products need aligned rows to be fast.
_ALIGNED = 8
# The widest side of a product that a kernel for thin ones computes.
_THIN = 128


def adapted_linear(
    x: Tensor,
    weight_OK: Tensor | HeldWeight,
    bias_O: Tensor | None,
    a_RK: Tensor,
    b_OR: Tensor,
    *,
    scale: float,
    numerics: Numerics = "fast",
    dropped: Tensor | None = None,
) -> Tensor:
    """Return the map of x with its update. `dropped`: the input of A, if it is not x.

    A held weight is made whole for each pass, and not kept in between.
    """
    if numerics == "invariant":
        product = held_linear if isinstance(weight_OK, HeldWeight) else linear
        out = product(x, weight_OK, bias_O, numerics=numerics)
        how = {"scale": scale, "numerics": numerics, "dropped": dropped}
        return added_update(out, x, a_RK, b_OR, **how)
    x_MK = x.reshape(-1, x.shape[-1])
    dropped_MK = None if dropped is None else dropped.reshape(x_MK.shape)
    tensors = (x_MK, dropped_MK, weight_OK, bias_O, a_RK, b_OR)
    if torch.is_grad_enabled():
        out_MO = _AdaptedLinear.apply(*tensors, scale)
    else:
        out_MO = _forward(*tensors, scale)[0]
    return out_MO.view(*x.shape[:-1], weight_OK.shape[0])


def added_update(
    out: Tensor,
    x: Tensor,
    a_RK: Tensor,
    b_OR: Tensor,
    *,
    scale: float,
    numerics: Numerics,
    dropped: Tensor | None = None,
) -> Tensor:
    """Return the result of another product of x with the update added."""
    low = linear(x if dropped is None else dropped, a_RK, numerics=numerics)
    if numerics == "invariant":
        return out + linear(low, b_OR, numerics=numerics) * scale
    flat = torch.addmm(out.flatten(0, -2), low.flatten(0, -2), b_OR.t(), alpha=scale)
    return flat.view(out.shape)


def _whole(weight: Tensor | HeldWeight) -> Tensor:
    return weight.tensor() if isinstance(weight, HeldWeight) else weight


def _forward(
    x_MK: Tensor,
    dropped_MK: Tensor | None,
    weight: Tensor | HeldWeight,
    bias_O: Tensor | None,
    a_RK: Tensor,
    b_OR: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return y and low."""
    weight_OK = _whole(weight)
    low_MR = (x_MK if dropped_MK is None else dropped_MK) @ a_RK.t()
    if is_joined(len(x_MK), inner=weight_OK.shape[1], outer=weight_OK.shape[0]):
        x_MJ, weight_OJ = _side_by_side(x_MK, low_MR, scale), _side_by_side(weight_OK, b_OR)
        return functional.linear(x_MJ, weight_OJ, bias_O), low_MR
    out_MO = functional.linear(x_MK, weight_OK, bias_O)
    return out_MO.addmm_(low_MR, b_OR.t(), alpha=scale), low_MR


def input_gradient(
    grad_MO: Tensor, weight_OK: Tensor, a_RK: Tensor, b_OR: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return g W + scale * (g B) A, [M, K], and g B, [M, R]."""
    num_outputs, num_inputs = weight_OK.shape
    if is_joined(len(grad_MO), inner=num_inputs, outer=num_outputs):
        # A wide gradient is read once for both.
        both_MJ = grad_MO @ _side_by_side(weight_OK, b_OR)
        low_grad_MR = both_MJ[:, num_inputs : num_inputs + len(a_RK)]
        return both_MJ[:, :num_inputs].addmm_(low_grad_MR, a_RK, alpha=scale), low_grad_MR
    low_grad_MR = grad_MO @ b_OR
    if is_joined(len(grad_MO), inner=num_outputs, outer=num_inputs):
        grad_MJ = _side_by_side(grad_MO, low_grad_MR, scale)
        missing = grad_MJ.shape[1] - num_outputs - len(a_RK)
        weight_JK = torch.cat([weight_OK, functional.pad(a_RK, (0, 0, 0, missing))])
        return grad_MJ @ weight_JK, low_grad_MR
    return (grad_MO @ weight_OK).addmm_(low_grad_MR, a_RK, alpha=scale), low_grad_MR


def is_joined(num_rows: int, *, inner: int, outer: int) -> bool:
    """Return whether copying inputs and weight takes less traffic than a pass over the result."""
    return (num_rows + outer) * inner < num_rows * outer


def _side_by_side(left_MK: Tensor, right_MR: Tensor, scale: float = 1.0) -> Tensor:
    """Return [left, scale * right], with columns of zeros up to an aligned width."""
    num_rows, width = left_MK.shape
    rank = right_MR.shape[1]
    padding = -(width + rank) % _ALIGNED
    joined = left_MK.new_empty(num_rows, width + rank + padding)
    joined[:, :width] = left_MK
    torch.mul(right_MR, scale, out=joined[:, width : width + rank])
    joined[:, width + rank :] = 0
    return joined


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        dropped_MK: Tensor | None,
        weight: Tensor | HeldWeight,
        bias_O: Tensor | None,
        a_RK: Tensor,
        b_OR: Tensor,
        scale: float,
    ) -> Tensor:
        out_MO, low_MR = _forward(x_MK, dropped_MK, weight, bias_O, a_RK, b_OR, scale)
        inputs_MK = x_MK if dropped_MK is None else dropped_MK
        ctx.held = weight if isinstance(weight, HeldWeight) else None
        kept = None if ctx.held is not None else weight
        ctx.save_for_backward(inputs_MK, kept, a_RK, b_OR, low_MR)
        ctx.scale, ctx.has_dropout = scale, dropped_MK is not None
        return out_MO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        inputs_MK, weight_OK, a_RK, b_OR, low_MR = ctx.saved_tensors
        weight_OK = weight_OK if ctx.held is None else ctx.held.tensor()
        (grad_MO,), scale = grads, ctx.scale
        needs_x, needs_dropped, needs_weight, needs_bias, needs_a, needs_b, _ = ctx.needs_input_grad
        assert not any((needs_weight, needs_bias)), "an adapter's base is frozen"
        dx_MK = ddropped_MK = None
        if needs_x and not ctx.has_dropout:
            dx_MK, low_grad_MR = input_gradient(grad_MO, weight_OK, a_RK, b_OR, scale)
        else:
            low_grad_MR = grad_MO @ b_OR
            dx_MK = grad_MO @ weight_OK if needs_x else None
            ddropped_MK = (low_grad_MR @ a_RK).mul_(scale) if needs_dropped else None
        da_RK = db_OR = None
        if needs_a:
            da_RK = _over_rows(low_grad_MR, inputs_MK).mul_(scale).to(a_RK.dtype)
        if needs_b:
            db_OR = _over_rows(low_MR, grad_MO).mul_(scale).t().to(b_OR.dtype)
        return dx_MK, ddropped_MK, None, None, da_RK, db_OR, None


def _over_rows(left_MR: Tensor, right_MK: Tensor) -> Tensor:
    """Return left^T @ right, [R, K]."""
    if kernels.fused(right_MK) and left_MR.shape[1] <= _THIN:
        from homeostat.ops.kernels.thin import thin_product

        return thin_product(_with_rows(left_MR), _with_rows(right_MK))
    return left_MR.t() @ right_MK


def _with_rows(x_MK: Tensor) -> Tensor:
    """Return x with the entries of a row side by side."""
    return x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
