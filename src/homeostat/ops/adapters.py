"""Frozen linear maps of one input with low-rank updates (LoRA), in few calls.

    y = x W^T + b + low B^T,    low = scale * z A^T,    z = x, or what dropout leaves of it

Only A and B have gradients:

    dlow = dy B,    dx = dy W + scale * dlow A,    dA = scale * dlow^T z,    dB = dy^T low

A rank is small, so the update costs hardly any arithmetic. It costs passes over x and y, and calls:
a GPU computes few rows faster than they are launched. So maps of one input (queries, keys and
values; gate and up) are computed together, their A as one matrix. And where outputs are wider than
inputs, low is joined to x, and B to W: one product makes the sum, and in the backward pass one
product reads the gradient of y for both dx and dlow. Else the sum is made in place, by the product
that makes the second summand. In `invariant` numerics each product stands for itself.

Suffixes: `_M` rows, `_K` inputs, `_O` outputs, `_R` rank, `_S` ranks of all maps, `_J` inputs or
outputs, and the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from homeostat.ops.held import HeldWeight, held_linear
from homeostat.ops.linear import Linear, Numerics, linear

# Joined rows are multiples of this: a library's products need aligned ones to be fast.
_ALIGNED = 8


@dataclass(frozen=True, slots=True)
class Factors:
    """A frozen map and its update. A held weight is made whole for each pass, and not kept."""

    weight_OK: Tensor | HeldWeight
    bias_O: Tensor | None
    a_RK: Tensor
    b_OR: Tensor


class AdaptedLinear(Linear):
    """A linear map with a low-rank update."""

    scaling: float

    def factors(self) -> Factors | None:
        """Return what `adapted_linears` needs; None if the map must be computed by itself."""
        raise NotImplementedError


def outputs_of(x: Tensor, maps: Sequence[Linear]) -> list[Tensor]:
    """Return what each map makes of the same input; updated ones are computed together."""
    factors = [one.factors() if isinstance(one, AdaptedLinear) else None for one in maps]
    scales = {
        one.scaling
        for one, its in zip(maps, factors, strict=True)
        if isinstance(one, AdaptedLinear) and its is not None
    }
    if len(scales) != 1:
        return [one(x) for one in maps]
    together = [its for its in factors if its is not None]
    made = iter(adapted_linears(x, together, scale=scales.pop()))
    return [
        next(made) if its is not None else one(x) for one, its in zip(maps, factors, strict=True)
    ]


def adapted_linear(
    x: Tensor,
    factors: Factors,
    *,
    scale: float,
    numerics: Numerics = "fast",
    dropped: Tensor | None = None,
) -> Tensor:
    """Return the map of x with its update. `dropped`: the input of A, if it is not x."""
    if numerics == "fast":
        return adapted_linears(x, [factors], scale=scale, dropped=dropped)[0]
    weight, bias_O = factors.weight_OK, factors.bias_O
    if isinstance(weight, HeldWeight):
        out = held_linear(x, weight, bias_O, numerics=numerics)
    else:
        out = linear(x, weight, bias_O, numerics=numerics)
    how = {"scale": scale, "numerics": numerics, "dropped": dropped}
    return added_update(out, x, factors.a_RK, factors.b_OR, **how)


def adapted_linears(
    x: Tensor, maps: Sequence[Factors], *, scale: float, dropped: Tensor | None = None
) -> list[Tensor]:
    """Return the maps of x with their updates, which have one rank."""
    x_MK = x if x.ndim == 2 else x.flatten(0, -2)
    dropped_MK = dropped if dropped is None or dropped.ndim == 2 else dropped.flatten(0, -2)
    held = [one.weight_OK if isinstance(one.weight_OK, HeldWeight) else None for one in maps]
    weights = [one.weight_OK if isinstance(one.weight_OK, Tensor) else None for one in maps]
    biases, a, b = ([getattr(one, name) for one in maps] for name in ("bias_O", "a_RK", "b_OR"))
    if torch.is_grad_enabled():
        outs = _AdaptedLinears.apply(x_MK, dropped_MK, scale, held, *weights, *biases, *a, *b)
    else:
        whole = _whole(weights, held)
        outs = _forward(x_MK, dropped_MK, scale, whole, biases, _stacked(a), b)[0]
    return list(outs) if x.ndim == 2 else [out.view(*x.shape[:-1], -1) for out in outs]


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


def _forward(
    x_MK: Tensor,
    dropped_MK: Tensor | None,
    scale: float,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    a_SK: Tensor,
    b: Sequence[Tensor],
) -> tuple[list[Tensor], Tensor]:
    """Return each map's y, and low of all of them."""
    low_MS = _scaled(x_MK if dropped_MK is None else dropped_MK, a_SK.t(), scale)
    if _are_joined(weights, a_SK):
        x_MJ = torch.cat([x_MK, low_MS], 1)
        joined = _with_b(weights, b)
        pairs = zip(joined, biases, strict=True)
        return [functional.linear(x_MJ, weight_OJ, bias_O) for weight_OJ, bias_O in pairs], low_MS
    lows = low_MS.split(b[0].shape[1], 1)
    outs = [functional.linear(x_MK, *pair) for pair in zip(weights, biases, strict=True)]
    triples = zip(outs, lows, b, strict=True)
    return [out_MO.addmm_(low_MR, b_OR.t()) for out_MO, low_MR, b_OR in triples], low_MS


def _gradients(
    dys: Sequence[Tensor],
    scale: float,
    weights: Sequence[Tensor],
    a_SK: Tensor,
    b: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return dx, [M, K], and dlow, [M, S]."""
    if _are_joined(weights, a_SK):
        both_MJ = _summed_products(dys, _with_b(weights, b))
        num_inputs = a_SK.shape[1]
        dx_MK, dlow_MS = both_MJ[:, :num_inputs], both_MJ[:, num_inputs:]
        return dx_MK.addmm_(dlow_MS, a_SK, alpha=scale), dlow_MS
    dlow_MS = _dlow(dys, b)
    num_outputs = sum(map(len, weights))
    if num_outputs < a_SK.shape[1] and (num_outputs + len(a_SK)) % _ALIGNED == 0:
        # The result is the wide side: no pass over it.
        return torch.cat([*dys, dlow_MS], 1) @ torch.cat([*weights, a_SK * scale]), dlow_MS
    return _summed_products(dys, weights).addmm_(dlow_MS, a_SK, alpha=scale), dlow_MS


def _are_joined(weights: Sequence[Tensor], a_SK: Tensor) -> bool:
    """Return whether a copy of the inputs costs less than a pass over the outputs."""
    num_inputs = a_SK.shape[1]
    is_aligned = (num_inputs + len(a_SK)) % _ALIGNED == 0
    return is_aligned and num_inputs < sum(map(len, weights))


def _with_b(weights: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """Return [W, B] of each map, with zeros in place of the other maps' B."""
    if len(b) == 1:
        return [torch.cat([weights[0], b[0]], 1)]
    rank, widest = b[0].shape[1], max(map(len, b))
    none = b[0].new_zeros(widest, rank * (len(b) - 1))
    joined = []
    for number, (weight_OK, b_OR) in enumerate(zip(weights, b, strict=True)):
        before, after = none[: len(b_OR)].split([number * rank, none.shape[1] - number * rank], 1)
        joined.append(torch.cat([weight_OK, before, b_OR, after], 1))
    return joined


def _summed_products(dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    total = dys[0] @ weights[0]
    for dy_MO, weight in zip(dys[1:], weights[1:], strict=True):
        total.addmm_(dy_MO, weight)
    return total


def _dlow(dys: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    lows = [dy_MO @ b_OR for dy_MO, b_OR in zip(dys, b, strict=True)]
    return lows[0] if len(lows) == 1 else torch.cat(lows, 1)


def _stacked(a: Sequence[Tensor]) -> Tensor:
    """Return A of all maps as one matrix."""
    return a[0] if len(a) == 1 else torch.cat(list(a))


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale * left @ right in one call. A factor of 0 makes the summand irrelevant."""
    return torch.addmm(right[0], left, right, beta=0, alpha=scale)


def _whole(weights: Sequence[Any], held: Sequence[HeldWeight | None]) -> list[Tensor]:
    """Return all weights, made of their codes where they are held."""
    pairs = zip(weights, held, strict=True)
    return [weight if codes is None else codes.tensor() for weight, codes in pairs]


class _AdaptedLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        dropped_MK: Tensor | None,
        scale: float,
        held: Sequence[HeldWeight | None],
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        """`tensors`: weights, None where they are held; biases; A; B."""
        weights, biases, a, b = _by_kind(tensors, count=len(held))
        whole, a_SK = _whole(weights, held), _stacked(a)
        outs, low_MS = _forward(x_MK, dropped_MK, scale, whole, biases, a_SK, b)
        inputs_MK = x_MK if dropped_MK is None else dropped_MK
        ctx.save_for_backward(inputs_MK, low_MS, *weights, *a, *b)
        ctx.scale, ctx.held, ctx.has_dropout = scale, held, dropped_MK is not None
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Any) -> tuple[Any, ...]:
        count = len(ctx.held)
        inputs_MK, low_MS, *tensors = ctx.saved_tensors
        weights, a, b = _by_kind(tensors, count=count)
        needs_x, needs_dropped, _, _, *needs = ctx.needs_input_grad
        assert not any(needs[: 2 * count]), "an adapter's base is frozen"
        a_SK, dx_MK, ddropped_MK = _stacked(a), None, None
        if needs_x and not ctx.has_dropout:
            whole = _whole(weights, ctx.held)
            dx_MK, dlow_MS = _gradients(dys, ctx.scale, whole, a_SK, b)
        else:
            dlow_MS = _dlow(dys, b)
            dx_MK = _summed_products(dys, _whole(weights, ctx.held)) if needs_x else None
            ddropped_MK = _scaled(dlow_MS, a_SK, ctx.scale) if needs_dropped else None
        da_SK = _scaled(dlow_MS.t(), inputs_MK, ctx.scale)
        rank = len(a[0])
        lows = low_MS.split(rank, 1)
        db = [dy_MO.t() @ low_MR for dy_MO, low_MR in zip(dys, lows, strict=True)]
        frozen = [None] * (2 * count)
        return dx_MK, ddropped_MK, None, None, *frozen, *da_SK.split(rank), *db


def _by_kind(tensors: Sequence[Any], *, count: int) -> list[Sequence[Any]]:
    return [tensors[first : first + count] for first in range(0, len(tensors), count)]
