"""FP8 in the invariant numerics: outputs whose bits depend on their row and the weight alone.

Quantisation by blocks or rows looks at one row of activations at a time, so only the product has to
be fixed: by tiles of constant shape, on a CPU over dequantised numbers (ops/linear.py) and on a GPU
by a kernel of our own (ops/kernels/fp8_tiles.py). Trainer and engine call the same function. Scales
of a whole tensor depend on the other rows, and delayed ones on the past: both are refused.

Gradients are those of the fast numerics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from homeostat.errors import ModelError
from homeostat.ops.linear import tiled_product
from homeostat.precision.operands import Arithmetic, Emulation, Operand, TensorCores
from homeostat.precision.recipe import Fp8Recipe


def invariant_arithmetic_of(device: torch.device) -> Arithmetic:
    """Return how FP8 is computed on a device in invariant numerics."""
    return FixedTiles() if device.type == "cuda" else EmulatedTiles()


def require_invariant(recipe: Fp8Recipe, *, setting: str) -> None:
    """Raise ModelError for a recipe whose scales depend on other rows or on the past."""
    why = ""
    if recipe.history:
        why = f"{setting}.scaling=delayed takes scales from earlier updates"
    elif recipe.scaling == "tensorwise":
        why = f"{setting}.recipe=tensorwise gives all rows of a batch one scale"
    if why:
        raise ModelError(
            f"model.numerics is invariant, and {why}: a token's bits would depend on more than the "
            f"token and its context. Set {setting}.recipe to blockwise or rowwise with "
            f"{setting}.scaling=dynamic, or model.numerics=fast."
        )


class EmulatedTiles(Emulation):
    """The arithmetic of a CPU; the output is summed in tiles of constant shape."""

    def product(
        self, a: Operand, b: Operand, recipe: Fp8Recipe, *, sizes: tuple[int, int], fast: bool
    ) -> Tensor:
        # Only the output may have fast sums; gradients need not be invariant.
        if not fast:
            return super().product(a, b, recipe, sizes=sizes, fast=fast)
        return tiled_product(a.values, b.values)


class FixedTiles(TensorCores):
    """The arithmetic of a GPU with FP8 units; the output is summed in tiles of constant shape."""

    def product(
        self, a: Operand, b: Operand, recipe: Fp8Recipe, *, sizes: tuple[int, int], fast: bool
    ) -> Tensor:
        if not fast:
            return super().product(a, b, recipe, sizes=sizes, fast=fast)
        from homeostat.ops.kernels.fp8_tiles import scaled_product

        assert a.scales is not None, "an operand of tensor cores has scales"
        assert b.scales is not None, "an operand of tensor cores has scales"
        num_rows, num_outputs = sizes
        out_MO = scaled_product(
            a.values,
            a.scales,
            b.values,
            b.scales,
            num_rows=num_rows,
            is_blockwise=recipe.scaling == "blockwise",
        )
        return out_MO[:, :num_outputs].contiguous()
