"""FP8 on tensors without data, to find out how much memory a run would need.

On a CPU the emulation runs as it is. Tensor cores have no kernels for tensors without data: what
they hold is written down here. Copies of weights are made beforehand: they are held throughout, and
counted as such.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from homeostat.config.fp8 import Fp8Config
from homeostat.precision.fp8_linear import Fp8Product
from homeostat.precision.fp8_model import Fp8Rewrite, rewrite_fp8
from homeostat.precision.operands import NO_AMAX, Amax, Operand, Pair
from homeostat.precision.recipe import BLOCK, Fp8Recipe

META = torch.device("meta")


class ShapeCores:
    """Tensor cores without data. Implements `Arithmetic`."""

    def operands(
        self,
        x_RC: Tensor,
        recipe: Fp8Recipe,
        dtype: torch.dtype,
        *,
        is_weight: bool = False,
        rows: bool = True,
        columns: bool = True,
        amax: Amax = NO_AMAX,
        into: Pair = (None, None),
    ) -> Pair:
        num_rows, num_columns = x_RC.shape
        by_rows = _operand(num_rows, num_columns, recipe, dtype) if rows else None
        return by_rows, _operand(num_columns, num_rows, recipe, dtype) if columns else None

    def product(
        self, a: Operand, b: Operand, recipe: Fp8Recipe, *, sizes: tuple[int, int], fast: bool
    ) -> Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16, device=META)


def _operand(num_rows: int, num_columns: int, recipe: Fp8Recipe, dtype: torch.dtype) -> Operand:
    padded = [-(-size // recipe.multiple) * recipe.multiple for size in (num_rows, num_columns)]
    per_row = -(-num_columns // BLOCK) if recipe.scaling == "blockwise" else 1
    num_scales = 1 if recipe.scaling == "tensorwise" else padded[0] * per_row
    values = torch.empty(padded, dtype=dtype, device=META)
    return Operand(values, torch.empty(num_scales, dtype=torch.float32, device=META))


def rewrite_shape(model: nn.Module, config: Fp8Config, *, device: torch.device) -> Fp8Rewrite:
    """Rewrite a model on the meta device as it would be on `device`, with its copies of weights."""
    cores = ShapeCores() if device.type == "cuda" else None
    rewrite = rewrite_fp8(model, config, device=META, arithmetic=cores)
    rewrite.begin_step(config.start_step)
    for layer in rewrite.layers():
        product = layer.module.product
        if isinstance(product, Fp8Product):
            weight = layer.weights["weight"]
            product.weights.by_rows(weight)
            if rewrite.recipe.gradients is not None:
                product.weights.by_columns(weight)
    return rewrite
