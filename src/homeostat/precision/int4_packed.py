"""Linear maps that hold packed INT4 weights and nothing else: how a quantised model is served.

The parameter stays on the meta device, so that sizes and names are known and no memory is taken.
Rows of a prompt are multiplied by the weight dequantised for the moment; the decode kernels read
the packed words (rollout/native/cuda).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from homeostat.ops.linear import Linear, linear
from homeostat.precision.int4_rewrite import Int4Experts, Int4Linear


class PackedMatrix(Protocol):
    """Packed weights of several linear maps of the same inputs, one below the other."""

    def dequantised(self, *, dtype: torch.dtype, rows: slice) -> Tensor:
        """Return some outputs' rows of the weight, [outputs, inputs]."""
        ...


class PackedLinear:
    """The product of a linear map by rows of a packed matrix. Implements `LinearProduct`."""

    def __init__(self, matrix: PackedMatrix, rows: slice) -> None:
        self.matrix = matrix
        self.rows = rows

    def __call__(self, x: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
        del weight_OK
        return linear(x, self.matrix.dequantised(dtype=x.dtype, rows=self.rows), bias_O)


def hold_packed(maps: Sequence[Linear], matrix: PackedMatrix) -> None:
    """Let linear maps of the same inputs compute with a packed matrix, and drop their weights."""
    start = 0
    for module in maps:
        rows = slice(start, start + module.out_features)
        start = rows.stop
        module.product = PackedLinear(matrix, rows)
        meta = torch.empty_like(module.weight, device="meta")
        module.weight = nn.Parameter(meta, requires_grad=False)


def packed_matrix(maps: Sequence[Linear]) -> PackedMatrix | None:
    """Return the matrix that linear maps hold together; None if they do not hold one."""
    products = [module.product for module in maps]
    if not all(isinstance(product, PackedLinear) for product in products):
        return None
    matrices = {id(product.matrix): product.matrix for product in products}
    return next(iter(matrices.values())) if len(matrices) == 1 else None


def is_int4(model: nn.Module) -> bool:
    """Return whether layers of a model are in INT4, now or after a later step."""
    kinds = PackedLinear | Int4Linear | Int4Experts
    return any(isinstance(getattr(m, "product", None), kinds) for m in model.modules())
