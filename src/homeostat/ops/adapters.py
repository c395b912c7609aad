"""A frozen linear map with a low-rank update (LoRA), forward and backward in few calls.

    y = x W^T + b + low B^T,    low = scale * z A^T,    z = x, or what dropout leaves of it

Only A and B have gradients:

    dlow = scale * dy B,    dx = dy W + dlow A,    dA = dlow^T z,    dB = dy^T low

A rank is small, so that the update costs hardly any arithmetic. What it costs are passes over x and
y, and calls: a GPU computes few rows faster than they are launched. So sums are made in place, by
the product that makes the second summand, and the scale is part of a product, too. Where a result
is far wider than the inputs, and large, that pass over it costs more than a copy of the inputs: then
[x, low] and [W, B] are joined, and one product makes the sum. In `invariant` numerics each product
stands for itself.

Suffixes: `_M` rows, `_K` inputs, `_O` outputs, `_R` rank, `_J` inputs or outputs, and the rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from homeostat.ops.held import HeldWeight, held_linear
from homeostat.ops.linear import Numerics, linear

# Bytes of a result from which on a pass over it takes a GPU longer than launching the copies.
_LARGE = 1 << 28
# Joined rows are multiples of this: a library's products need aligned ones to be fast.
_ALIGNED = 8


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
    if x.ndim == 2:
        return _adapted(x, dropped, weight_OK, bias_O, a_RK, b_OR, scale)
    dropped_MK = None if dropped is None else dropped.flatten(0, -2)
    out_MO = _adapted(x.flatten(0, -2), dropped_MK, weight_OK, bias_O, a_RK, b_OR, scale)
    return out_MO.view(*x.shape[:-1], -1)


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


def _adapted(x_MK: Tensor, dropped_MK: Tensor | None, *rest: Any) -> Tensor:
    if torch.is_grad_enabled():
        return _AdaptedLinear.apply(x_MK, dropped_MK, *rest)
    return _forward(x_MK, dropped_MK, *rest)[0]


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
    weight_OK = weight.tensor() if isinstance(weight, HeldWeight) else weight
    low_MR = _scaled(x_MK if dropped_MK is None else dropped_MK, a_RK.t(), scale)
    if _is_wide(x_MK, *reversed(weight_OK.shape), rank=len(a_RK)):
        x_MJ, weight_OJ = torch.cat([x_MK, low_MR], 1), torch.cat([weight_OK, b_OR], 1)
        return functional.linear(x_MJ, weight_OJ, bias_O), low_MR
    out_MO = functional.linear(x_MK, weight_OK, bias_O)
    return out_MO.addmm_(low_MR, b_OR.t()), low_MR


def _gradients(
    grad_MO: Tensor, weight_OK: Tensor, a_RK: Tensor, b_OR: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return dx, [M, K], and dlow, [M, R]."""
    num_outputs, num_inputs = weight_OK.shape
    if _is_wide(grad_MO, num_inputs, num_outputs, rank=len(a_RK)):
        # A wide gradient is read once for both.
        both_MJ = grad_MO @ torch.cat([weight_OK, b_OR * scale], 1)
        dx_MK, dlow_MR = both_MJ[:, :num_inputs], both_MJ[:, num_inputs:]
        return dx_MK.addmm_(dlow_MR, a_RK), dlow_MR
    dlow_MR = _scaled(grad_MO, b_OR, scale)
    if _is_wide(grad_MO, num_outputs, num_inputs, rank=len(a_RK)):
        return torch.cat([grad_MO, dlow_MR], 1) @ torch.cat([weight_OK, a_RK]), dlow_MR
    return (grad_MO @ weight_OK).addmm_(dlow_MR, a_RK), dlow_MR


def _is_wide(like: Tensor, narrow: int, wide: int, *, rank: int) -> bool:
    """Return whether rows of the wide side are worth the copies that save a pass over them."""
    is_aligned = (narrow + rank) % _ALIGNED == 0
    return wide > 2 * narrow and is_aligned and len(like) * wide * like.itemsize >= _LARGE


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale * left @ right in one call. A factor of 0 makes the summand irrelevant."""
    return torch.addmm(right[0], left, right, beta=0, alpha=scale)


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
        needs_x, needs_dropped, needs_weight, needs_bias, needs_a, needs_b, _ = ctx.needs_input_grad
        assert not any((needs_weight, needs_bias)), "an adapter's base is frozen"
        (grad_MO,), dx_MK, ddropped_MK = grads, None, None
        if needs_x and ctx.held is not None:
            weight_OK = ctx.held.tensor()
        if needs_x and not ctx.has_dropout:
            dx_MK, dlow_MR = _gradients(grad_MO, weight_OK, a_RK, b_OR, ctx.scale)
        else:
            dlow_MR = _scaled(grad_MO, b_OR, ctx.scale)
            dx_MK = grad_MO @ weight_OK if needs_x else None
            ddropped_MK = dlow_MR @ a_RK if needs_dropped else None
        da_RK = dlow_MR.t() @ inputs_MK if needs_a else None
        db_OR = grad_MO.t() @ low_MR if needs_b else None
        return dx_MK, ddropped_MK, None, None, da_RK, db_OR, None
