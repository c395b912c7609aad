"""Linear maps in two numerics.

    fast       one matrix product over all rows
    invariant  tiles of constant shape, the last of them padded

Invariant of `invariant`: the result of a row has the same bits whatever other rows there are, how
many, and where it is among them. A library's matrix product chooses its kernel, its split over
threads and its order of summation by the shape; with one shape there is one order.

On the CPU a tile is a product of `TILE_ROWS` rows. We rely on the library for one property: the
sums of a row must not depend on its place in the tile. This was observed with MKL 2024.2 on
AVX-512, with 1, 2 and 3 threads, for 8 to 4096 inputs and outputs, with one exception: a single
output is a matrix-vector product, whose sums do depend on the place. So narrow maps are widened
with zeros. Tiles start at multiples of 128 bytes of an allocation, so that alignment is constant,
too.

On CUDA a kernel (ops/kernels/products.py) has its own tiles and does not depend on a library; fp32
sums, including the bias, are rounded once.

The backward pass is an ordinary one: gradients of both numerics agree up to rounding.

Suffixes: `_M` rows, `_K` inputs, `_O` outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from homeostat.ops import kernels

Numerics = Literal["fast", "invariant"]

# Rows of a tile. Fewer waste less on padding; more make each product faster.
TILE_ROWS = 32
# Narrower products may become matrix-vector products, whose sums depend on the row's place.
_MIN_OUTPUTS = 8


class LinearProduct(Protocol):
    """Computes x @ weight.T + bias over the last dimension, differentiably."""

    def __call__(self, x: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor: ...


class Linear(nn.Linear):
    """nn.Linear in the numerics of its model.

    A rewrite to another precision (precision/) exchanges `product` and leaves the parameters.
    """

    def __init__(self, *sizes: int, bias: bool, numerics: Numerics, **place: Any) -> None:
        super().__init__(*sizes, bias=bias, **place)
        self.numerics: Numerics = numerics
        self.product: LinearProduct = plain_product(numerics)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def plain_product(numerics: Numerics) -> LinearProduct:
    """Return the product of a map that no rewrite has touched."""
    return partial(linear, numerics=numerics)


def is_plain(module: nn.Module) -> bool:
    """Return whether a module is a linear map that its weight and bias alone describe."""
    return type(module) is Linear and is_plain_product(module.product)


def is_plain_product(product: LinearProduct) -> bool:
    """Return whether a map's product is its own, and not that of a rewrite."""
    return isinstance(product, partial) and product.func is linear


def linear(
    x: Tensor, weight_OK: Tensor, bias_O: Tensor | None = None, *, numerics: Numerics = "fast"
) -> Tensor:
    """Return x @ weight.T + bias over the last dimension."""
    if numerics == "fast":
        return functional.linear(x, weight_OK, bias_O)
    out_MO = _TiledLinear.apply(x.reshape(-1, x.shape[-1]), weight_OK, bias_O)
    return out_MO.view(*x.shape[:-1], weight_OK.shape[0])


def tiled_product(
    x_MK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return [M, O]: x @ weight.T + bias, tile by tile. Not differentiable.

    The result has the dtype of x unless `out_dtype` is given.
    """
    out_dtype = out_dtype or x_MK.dtype
    if kernels.fused(x_MK):
        from homeostat.ops.kernels.products import product

        return product(x_MK, weight_OK, bias_O, out_dtype=out_dtype)
    out_MO = _product_of_tiles(x_MK, weight_OK)
    # Adding the bias is one rounding per element, so its result does not depend on the tile.
    return (out_MO if bias_O is None else out_MO + bias_O).to(out_dtype)


def _product_of_tiles(x_MK: Tensor, weight_OK: Tensor) -> Tensor:
    num_outputs = weight_OK.shape[0]
    if num_outputs < _MIN_OUTPUTS:
        return _product_of_tiles(x_MK, widened(weight_OK))[:, :num_outputs]
    # A contiguous input gives every tile the same strides and alignment.
    x_MK, weight_KO = x_MK.contiguous(), weight_OK.t()
    out_MO = x_MK.new_empty(x_MK.shape[0], num_outputs)
    num_left = x_MK.shape[0] % TILE_ROWS
    num_full = x_MK.shape[0] - num_left
    if num_full:
        tiles = zip(x_MK[:num_full].split(TILE_ROWS), out_MO.split(TILE_ROWS), strict=False)
        for tile_mK, out_mO in tiles:
            torch.mm(tile_mK, weight_KO, out=out_mO)
    if num_left:
        # The remainder must have the same shape as all other tiles, or the library may sum in
        # another order.
        padded_mK = _pad_rows(x_MK[num_full:])
        out_MO[num_full:] = torch.mm(padded_mK, weight_KO)[:num_left]
    return out_MO


def widened(weight_OK: Tensor) -> Tensor:
    """Pad the weight with rows of zeros to the smallest number of outputs that a tile may have."""
    missing = _MIN_OUTPUTS - weight_OK.shape[0]
    return functional.pad(weight_OK, (0, 0, 0, missing)) if missing > 0 else weight_OK


def _pad_rows(x_M: Tensor) -> Tensor:
    """Append rows of zeros up to a whole number of tiles."""
    missing = -x_M.shape[0] % TILE_ROWS
    return functional.pad(x_M, (0, 0) * (x_M.ndim - 1) + (0, missing))


class _TiledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_MK, weight_OK)
        return tiled_product(x_MK, weight_OK, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x_MK, weight_OK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        (grad_MO,) = grads
        return (
            grad_MO @ weight_OK if needs_x else None,
            grad_MO.t() @ x_MK if needs_weight else None,
            grad_MO.sum(0) if needs_bias else None,
        )
