"""The model that an INT4 engine serves beside a trainer in another precision.

The module tree is copied and its parameters are not (fp8_model.py), and its linear maps get
separate INT4 weights, in the coarsest groups that fit all layers. On a GPU they are held packed,
and nothing else (`packs`): prompts are multiplied by weights that are dequantised for the moment.
On a CPU, and for experts, they are rounded copies. All are derived again at every commit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from homeostat.config.int4 import Int4Config
from homeostat.config.native import NativeEngineConfig
from homeostat.models.decoder import Decoder
from homeostat.ops.linear import Linear
from homeostat.precision.int4 import GROUP_SIZES
from homeostat.precision.int4_packed import PackedLinear
from homeostat.precision.int4_rewrite import Int4Rewrite, fitting_sizes, int4_choices
from homeostat.precision.layers import layers_of
from homeostat.rollout.native.cuda.int4_layout import Int4Matrix
from homeostat.rollout.native.fp8_model import shared_copy

# Linear maps of the same inputs.
_NEIGHBOURS = (
    ("q_proj", "k_proj", "v_proj"),
    ("qkv_proj",),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("gate_up_proj",),
    ("down_proj",),
)


def engine_config(model: Decoder) -> Int4Config:
    """Return the coarsest groups that fit all layers. Raise ModelError if none do."""
    sizes = fitting_sizes([layer for layer in layers_of(model) if layer.block is not None])
    config = Int4Config.model_validate({"group_size": max(sizes, default=min(GROUP_SIZES))})
    int4_choices(model, config)
    return config


def int4_model(
    model: Decoder, config: NativeEngineConfig, *, device: torch.device
) -> Int4Model | None:
    """Return the INT4 model of an engine; None if it computes with the model as it is."""
    return Int4Model(model, packs=device.type == "cuda") if config.quantization == "int4" else None


class Int4Model:
    """A model whose linear maps are in INT4, over the parameters of another model."""

    def __init__(self, model: Decoder, *, packs: bool) -> None:
        self.model = shared_copy(model)
        self.config = engine_config(self.model)
        self._matrices: list[tuple[tuple[Linear, ...], Int4Matrix]] = []
        self._rewrite: Int4Rewrite | None = None
        skip = self.config.skip_layers
        if packs:
            # Weights that are packed are not rounded as well.
            linear = [layer.name for layer in layers_of(self.model) if layer.kind == "linear"]
            skip = (*skip, *linear)
            self._pack()
        if not packs or self.model.moe is not None:
            config = self.config.model_copy(update={"skip_layers": skip})
            self._rewrite = Int4Rewrite(self.model, config)

    def weights_changed(self) -> None:
        """Derive all INT4 weights again, into the same memory."""
        for maps, matrix in self._matrices:
            matrix.copy_(_packed(maps, group_size=self.config.group_size))
        if self._rewrite is not None:
            self._rewrite.weights_changed()

    def _pack(self) -> None:
        for maps in _neighbours(self.model):
            matrix = _packed(maps, group_size=self.config.group_size)
            self._matrices.append((maps, matrix))
            start = 0
            for linear in maps:
                stop = start + linear.out_features
                linear.product = PackedLinear(matrix, slice(start, stop))
                start = stop


def _neighbours(model: Decoder) -> Iterator[tuple[Linear, ...]]:
    """Yield the linear maps of all layers, those of the same inputs together."""
    for module in (module for layer in model.layers for module in layer.modules()):
        for names in _NEIGHBOURS:
            found = [getattr(module, name, None) for name in names]
            maps = tuple(linear for linear in found if isinstance(linear, Linear))
            if len(maps) == len(names):
                yield maps


def _packed(maps: tuple[Linear, ...], *, group_size: int) -> Int4Matrix:
    weights = [linear.weight.detach() for linear in maps]
    return Int4Matrix.of_weights(weights, group_size=group_size)
