"""The INT4 weights that the engine decodes from: packed, at fixed addresses.

A model that is trained for INT4 keeps its weights and rounded copies of them; the engine packs the
weights when it is made and after every commit, by the trainer's own function, so that both multiply
by the same numbers. If a model holds packed weights only (precision/int4_packed.py), the engine
reads these directly.

Weights that have the same inputs form one matrix: q, k and v; gate and up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from homeostat.models.blocks import MLP, Layer
from homeostat.models.decoder import Decoder
from homeostat.models.side_by_side import joined
from homeostat.ops.linear import Linear
from homeostat.precision.int4_packed import PackedLinear, packed_matrix
from homeostat.precision.int4_rewrite import Int4Experts, Int4Linear
from homeostat.rollout.native.cuda.int4_layout import TILE_OUTPUTS, Int4Matrix


def int4_products(model: nn.Module) -> list[Int4Linear | Int4Experts | PackedLinear]:
    """Return the INT4 products of a model, including those that are not rounded yet."""
    products = (getattr(module, "product", None) for module in model.modules())
    kinds = Int4Linear | Int4Experts | PackedLinear
    return [product for product in products if isinstance(product, kinds)]


class SwitchWatch:
    """Detects when the layers of a model switch to INT4 or back."""

    def __init__(self, model: nn.Module) -> None:
        self._products = int4_products(model)
        self._before = self.is_rounded

    @property
    def is_rounded(self) -> bool:
        """Return whether INT4 layers compute with INT4 numbers now. All switch together."""
        if not self._products:
            return False
        first = self._products[0]
        return isinstance(first, PackedLinear) or first.copies is not None

    def take_switch(self) -> bool:
        """Return whether they switched since the last call."""
        before, self._before = self._before, self.is_rounded
        return before is not self._before


@dataclass(frozen=True, slots=True)
class Maps:
    """Linear maps that have the same inputs, packed as one matrix."""

    maps: tuple[Linear, ...]
    matrix: Int4Matrix
    bias_O: Tensor | None

    @classmethod
    def of(cls, *maps: Linear, can_have_bias: bool = True) -> Maps | None:
        """Pack the maps. Return None if they cannot be packed.

        That is so if not all of them are in INT4, if they do not fill whole tiles, or if they have
        a bias that no kernel adds.
        """
        if any(module.out_features % TILE_OUTPUTS for module in maps):
            return None
        biases = [module.bias for module in maps if module.bias is not None]
        if biases and (not can_have_bias or len(biases) < len(maps)):
            return None
        matrix = _matrix(maps)
        if matrix is None:
            return None
        bias_O = None
        if biases:
            bias_O = joined(biases)
            if bias_O is None:
                # The bias is written in place by updates, so a copy of it would go stale.
                return None
        return cls(maps, matrix, bias_O)

    @property
    def sizes(self) -> list[int]:
        return [module.out_features for module in self.maps]

    def refresh(self) -> None:
        """Pack the weights again, into the same memory. Weights held packed never change."""
        if packed_matrix(self.maps) is None:
            self.matrix.copy_(_packed(self.maps))


@dataclass(frozen=True, slots=True)
class Int4Layer:
    """The packed maps of a layer; None for those that are not in INT4."""

    qkv: Maps | None
    o: Maps | None
    gate_up: Maps | None
    down: Maps | None

    @classmethod
    def of(cls, layer: Layer) -> Int4Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = Maps.of(attention.q_proj, attention.k_proj, attention.v_proj)
        o = Maps.of(attention.o_proj)
        if not isinstance(mlp, MLP):
            return cls(qkv, o, None, None)
        gate_up = Maps.of(mlp.gate_proj, mlp.up_proj, can_have_bias=False)
        return cls(qkv, o, gate_up, Maps.of(mlp.down_proj))

    @property
    def parts(self) -> list[Maps]:
        return [maps for maps in (self.qkv, self.o, self.gate_up, self.down) if maps is not None]


class Int4Weights:
    """The packed weights of all layers."""

    def __init__(self, model: Decoder) -> None:
        self.layers = [Int4Layer.of(layer) for layer in model.layers]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all packed matrices."""
        return sum(maps.matrix.num_bytes for layer in self.layers for maps in layer.parts)

    def refresh(self) -> None:
        """Pack all weights again, into the same memory."""
        for layer in self.layers:
            for maps in layer.parts:
                maps.refresh()


def _matrix(maps: Sequence[Linear]) -> Int4Matrix | None:
    held = packed_matrix(maps)
    if held is not None:
        assert isinstance(held, Int4Matrix), type(held)
        return held
    return _packed(maps) if all(isinstance(m.product, Int4Linear) for m in maps) else None


def _packed(maps: Sequence[Linear]) -> Int4Matrix:
    copies = [module.product.copies for module in maps]
    assert all(copy is not None for copy in copies), "packed while the layers are rounded"
    weights = [module.weight.detach() for module in maps]
    return Int4Matrix.of_weights(weights, group_size=copies[0].group_size)
