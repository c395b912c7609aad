"""Load a checkpoint with packed INT4 weights onto a GPU, packed: a quarter of what bf16 takes.

    model on the meta device -> memory for what is not packed -> tensors, one at a time; matrices
    of the same inputs are laid out together for the decode kernels

Experts are dequantised: no decode kernel reads packed ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from homeostat.config.model import ModelConfig
from homeostat.models import hf, weights
from homeostat.models.blocks import MLP, Attention
from homeostat.models.build import (
    LoadedModel,
    config_origin,
    decoder_flags,
    model_sheet,
    new_decoder,
    read_configs,
    unquantised,
)
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.hub_names import stacked_tensors
from homeostat.ops.linear import Linear
from homeostat.precision.int4 import Quantised, dequantise
from homeostat.precision.int4_files import PackedWeight, read_packed
from homeostat.precision.int4_packed import hold_packed
from homeostat.rollout.native.cuda.int4_layout import Int4Matrix

_PACKED = ".weight_packed"


def load_packed(
    model: ModelConfig, *, group_size: int, device: torch.device, dtype: torch.dtype
) -> LoadedModel:
    """Build the model with its packed weights on the device, and nothing beside them."""
    started, folder = time.perf_counter(), Path(model.path)
    config, generation_config = read_configs(folder)
    shape = decoder_config(unquantised(config), origin=config_origin(folder))
    flags = decoder_flags(model, shape, False, dtype=dtype, device=device)
    with torch.device("meta"):
        module = new_decoder(shape, flags, has_value_head=False).to(dtype)
    module.requires_grad_(False)
    packer = _Packer(module, folder, device=device)
    _allocate(module, device, without=packer.names)
    where = f"model.path: {folder}"
    tensors = read_packed(hf.read_tensors(folder), group_size=group_size, source=where)
    plain = stacked_tensors(shape.moe, packer.taken(tensors), source=where)
    weights.fill(module, plain, source=where, without=packer.names)
    facts = {
        "implementation": model.implementation,
        "attention": module.kernel,
        "int4_group_size": group_size,
        "bytes": packer.num_bytes + sum(p.nbytes for p in module.parameters() if not p.is_meta),
        "seconds": time.perf_counter() - started,
    }
    return LoadedModel(module, model_sheet(module, config, generation_config, facts))


class _Packer:
    """Collects the packed weights of linear maps until those of the same inputs are complete."""

    def __init__(self, module: Decoder, folder: Path, *, device: torch.device) -> None:
        stored = hf.tensor_names(folder)
        packed = {name.removesuffix("_packed") for name in stored if name.endswith(_PACKED)}
        named = {f"{name}.weight": m for name, m in module.named_modules()}
        # Weights of linear maps; packed experts are not among them.
        self.names = {name for name in packed if isinstance(named.get(name), Linear)}
        self._maps = {name: named[name] for name in self.names}
        self._group_of = {name: group for group in _groups(module, self.names) for name in group}
        self._waiting: dict[str, Quantised] = {}
        self._device = device
        self.num_bytes = 0

    def taken(
        self, tensors: Iterator[tuple[str, Tensor | PackedWeight]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield what is not held packed."""
        for name, tensor in tensors:
            if isinstance(tensor, Tensor):
                yield name, tensor
            elif name in self.names:
                self._take(name, tensor)
            else:
                yield name, dequantise(tensor.quantised(), dtype=tensor.scales_OG.dtype)

    def _take(self, name: str, weight: PackedWeight) -> None:
        here = PackedWeight(
            weight.packed_OW.to(self._device), weight.scales_OG.to(self._device), weight.shape
        )
        self._waiting[name] = here.quantised()
        group = self._group_of[name]
        if all(member in self._waiting for member in group):
            matrix = Int4Matrix.of([self._waiting.pop(member) for member in group])
            # pyrefly: ignore[bad-argument-type] torch says that a part may be any module
            hold_packed([self._maps[member] for member in group], matrix)
            self.num_bytes += matrix.num_bytes


def _groups(module: Decoder, names: set[str]) -> Iterator[tuple[str, ...]]:
    """Yield the weights that are laid out together: those of the same inputs, if all are packed."""
    for name, part in module.named_modules():
        if isinstance(part, Attention):
            yield from _together(name, _names(part, part.into_heads), names)
            yield from _together(name, ("o_proj",), names)
        elif isinstance(part, MLP):
            yield from _together(name, _names(part, part.into_gates), names)
            yield from _together(name, ("down_proj",), names)


def _names(owner: nn.Module, maps: Sequence[nn.Module]) -> list[str]:
    return [name for name, part in owner.named_children() if any(part is one for one in maps)]


def _together(owner: str, maps: Sequence[str], names: set[str]) -> Iterator[tuple[str, ...]]:
    whole = tuple(f"{owner}.{name}.weight" for name in maps)
    if all(name in names for name in whole):
        yield whole
    else:
        yield from ((name,) for name in whole if name in names)


def _allocate(module: Decoder, device: torch.device, *, without: set[str]) -> None:
    """Give parameters memory; biases of the same inputs are side by side, as kernels read them."""
    for owner, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            if f"{owner}.{name}".lstrip(".") not in without:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                setattr(part, name, nn.Parameter(empty, requires_grad=False))
    for layer in module.layers:
        attention = layer.self_attn
        maps = attention.into_heads
        if all(linear.bias is not None for linear in maps):
            whole = torch.cat([linear.bias for linear in maps])
            sizes = [linear.out_features for linear in maps]
            for linear, bias in zip(maps, whole.split(sizes), strict=True):
                linear.bias.data = bias
