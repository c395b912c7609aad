"""The e4m3 copies of weights that the engine decodes from.

They are the copies that the model's own products read (precision/fp8_linear.py), laid side by side
where maps have the same inputs (q, k and v; gate and up): one launch multiplies by all of them.
They are made again at every commit, at the same addresses.

Suffixes: `_O` outputs, `_K` inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from homeostat.models.moe import Experts
from homeostat.models.side_by_side import joined
from homeostat.ops.linear import Linear
from homeostat.precision.fp8 import quantise
from homeostat.precision.fp8_experts import Fp8Experts
from homeostat.precision.fp8_linear import Fp8Product
from homeostat.precision.operands import Operand, TensorCores
from homeostat.precision.recipe import BLOCK, E4M3, Fp8Recipe

# Rows of tiles are copied by multiples of so many bytes.
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Scaling:
    """The inputs that share a scale: a block of neighbours, or all of a row."""

    is_blockwise: bool
    has_power_of_two_scales: bool

    @classmethod
    def of(cls, recipe: Fp8Recipe) -> Scaling:
        """Return how rows are scaled in decoding.

        With a tensorwise recipe a row of activations has its own scale, because one for the whole
        batch would make a token depend on what else is decoded.
        """
        return cls(recipe.scaling == "blockwise", recipe.power_of_two)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """Weights in e4m3 with fp32 scales: [O / 128, blocks of inputs] of squares, or [O] of rows."""

    values_OK: Tensor
    scales: Tensor
    scaling: Scaling

    @property
    def num_outputs(self) -> int:
        return self.values_OK.shape[0]

    @property
    def pitch(self) -> int:
        """Scales from one row of squares to the next."""
        return self.scales.stride(0)


class Fp8Maps:
    """Linear maps of the same inputs, whose copies are one weight."""

    @torch.no_grad()
    def __init__(self, maps: Sequence[Linear], bias_O: Tensor | None) -> None:
        self.maps, self.bias_O = maps, bias_O
        products = [_product(linear) for linear in maps]
        self._products = products
        recipe = products[0].recipe
        self.sizes = [linear.weight.shape[0] for linear in maps]
        num_outputs, num_inputs = sum(self.sizes), maps[0].weight.shape[1]
        device = maps[0].weight.device
        values_OK = torch.empty(num_outputs, num_inputs, dtype=E4M3, device=device)
        self._by_map = _empty_scales(recipe, self.sizes, num_inputs, device=device)
        scales = self._by_map
        if recipe.scaling == "tensorwise":
            scales = torch.empty(num_outputs, device=device)
        self.weight = Fp8Weight(values_OK, scales, Scaling.of(recipe))
        parts = zip(values_OK.split(self.sizes), self._scales_of(recipe), strict=True)
        self._places = [Operand(*part, recipe.scaling == "blockwise") for part in parts]
        for product, place in zip(products, self._places, strict=True):
            if not self._is_emulated:
                product.weights.place(place)
        self.refresh()

    @property
    def _is_emulated(self) -> bool:
        """Return whether kernels are interpreted: there the model's own copies are dequantised."""
        return not isinstance(self._products[0].arithmetic, TensorCores)

    def _scales_of(self, recipe: Fp8Recipe) -> Sequence[Tensor]:
        """The part of the scales that each map's product reads and writes."""
        if recipe.scaling == "tensorwise":
            return [scales[:1] for scales in self._by_map]
        side = BLOCK if recipe.scaling == "blockwise" else 1
        return self._by_map.split([size // side for size in self.sizes])

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the copies of weights that have changed again."""
        for product, linear, place in zip(self._products, self.maps, self._places, strict=True):
            if self._is_emulated:
                _emulate(linear.weight, product.recipe, place)
            else:
                product.weights.by_rows(linear.weight)
        if self.weight.scales is not self._by_map:
            parts = zip(self.weight.scales.split(self.sizes), self._by_map, strict=True)
            for part_O, scales in parts:
                part_O.copy_(scales[:1].expand_as(part_O))


def _emulate(weight_OK: Tensor, recipe: Fp8Recipe, place: Operand) -> None:
    found = quantise(weight_OK, block=recipe.weights, power_of_two=recipe.power_of_two)
    place.values.copy_(found.values)
    assert place.scales is not None
    place.scales.view(-1, place.scales.shape[-1])[:, : found.scales.shape[1]].copy_(found.scales)


def _empty_scales(
    recipe: Fp8Recipe, sizes: Sequence[int], num_inputs: int, *, device: torch.device
) -> Tensor:
    """Memory for the scales of all maps, as the copies of each hold them."""
    num_outputs = sum(sizes)
    if recipe.scaling == "tensorwise":
        # cuBLAS reads a scale only at an address that divides by 16 bytes.
        return torch.zeros(len(sizes), 4, device=device)
    if recipe.scaling == "rowwise":
        return torch.zeros(num_outputs, 1, device=device)
    # Rows of squares are padded to 4 scales, as cuBLAS reads them.
    pitch = -(-(num_inputs // BLOCK) // 4) * 4
    return torch.zeros(num_outputs // BLOCK, pitch, device=device)


def fp8_maps(*maps: Linear) -> Fp8Maps | None:
    """Return the copies of these maps as one weight; None if kernels cannot multiply by them.

    All must be in FP8, of sizes that need no padding, with biases that lie side by side.
    """
    if any(type(one) is not Linear or not isinstance(one.product, Fp8Product) for one in maps):
        return None
    recipe = _product(maps[0]).recipe
    multiple = BLOCK if recipe.scaling == "blockwise" else _ALIGNED
    is_whole = all(size % multiple == 0 for one in maps for size in one.weight.shape)
    biases = [one.bias for one in maps if one.bias is not None]
    bias_O = joined(biases) if biases else None
    if not is_whole or len(biases) not in (0, len(maps)):
        return None
    return None if biases and bias_O is None else Fp8Maps(maps, bias_O)


class Fp8Watch:
    """Detects when layers of a model switch to FP8, and keeps their copies up to date."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if hasattr(module, "product")]
        self._before = self._is_fp8

    @property
    def _is_fp8(self) -> bool:
        kinds = Fp8Product | Fp8Experts
        return any(isinstance(module.product, kinds) for module in self._modules)

    def refresh(self) -> bool:
        """Make copies of weights that have changed again; return whether FP8 began or ended."""
        for module in self._modules:
            if isinstance(module, Linear) and isinstance(module.product, Fp8Product):
                module.product.weights.by_rows(module.weight)
            elif isinstance(module, Experts) and isinstance(module.product, Fp8Experts):
                module.product.gate_up.copy(module.gate_up_proj, turned=False)
                module.product.down.copy(module.down_proj, turned=False)
        before, self._before = self._before, self._is_fp8
        return before is not self._before


def _product(linear: Linear) -> Fp8Product:
    assert isinstance(linear.product, Fp8Product), linear.product
    return linear.product
