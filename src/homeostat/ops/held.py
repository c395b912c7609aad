"""Frozen matrices that are stored in another format than the one in which they are multiplied.

A `HeldWeight` keeps the codes of a matrix and computes the matrix itself on request: in the forward
pass, and again in the backward pass. In between the matrix is not kept. Products always use the
same matrix, so trainer and engine agree as they do with plain weights.

`HeldLinear` is a linear map over such a matrix. It has no parameter called `weight`; the attribute
of that name makes the matrix.

Suffixes: `_M` rows, `_K` inputs, `_O` outputs.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from homeostat.ops.linear import Linear, Numerics, linear, plain_product, tiled_product


class HeldWeight(nn.Module):
    """A matrix [O, K] that is held as codes. Its parameters never have gradients.

    `dtype` is that of the matrix, in which products are computed.
    """

    shape: torch.Size
    dtype: torch.dtype

    @abstractmethod
    def tensor(self) -> Tensor:
        """Make the matrix, in its dtype."""

    @abstractmethod
    def take(self, weight_OK: Tensor) -> None:
        """Hold this matrix."""

    def numel(self) -> int:
        return self.shape.numel()


class HeldLinear(Linear):
    """A frozen linear map over a held weight, with the bias of the map that it replaces."""

    def __init__(self, base: nn.Linear, held: HeldWeight) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.numerics: Numerics = base.numerics if isinstance(base, Linear) else "fast"
        self.product = plain_product(self.numerics)
        self.held = held
        self.bias = base.bias

    @property
    def weight(self) -> Tensor:
        return self.held.tensor()

    def forward(self, x: Tensor) -> Tensor:
        return held_linear(x, self.held, self.bias, numerics=self.numerics)


def held_weights(module: nn.Module) -> dict[str, HeldWeight]:
    """Return the held weights of a module's linear maps, by the maps' names."""
    return {
        name.removesuffix(".held"): part
        for name, part in module.named_modules()
        if isinstance(part, HeldWeight)
    }


def held_linear(
    x: Tensor, held: HeldWeight, bias_O: Tensor | None, *, numerics: Numerics
) -> Tensor:
    """Return x @ weight.T + bias; the weight is made again for the gradient of x."""
    x_MK = x.reshape(-1, x.shape[-1])
    out_MO = _HeldProduct.apply(x_MK, held, bias_O, numerics)
    return out_MO.view(*x.shape[:-1], held.shape[0])


class _HeldProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, held: HeldWeight, bias_O: Tensor | None, numerics: Numerics
    ) -> Tensor:
        ctx.held = held
        if numerics == "fast":
            return linear(x_MK, held.tensor(), bias_O)
        return tiled_product(x_MK, held.tensor(), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        dx_MK = grads[0] @ ctx.held.tensor() if ctx.needs_input_grad[0] else None
        return dx_MK, None, None, None
