"""Quantised bases of adapters: a model's linear maps, held in 4 or 8 bits (model.quantization).

    decoder on the meta device -> its linear maps exchanged -> memory for the codes -> weights, each
    quantised as it is read

So the peak memory is the size of the codes and of one matrix. Embeddings, norms and the output
matrix keep their precision, as in QLoRA; experts are stacks, which cannot be held in this way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from homeostat.config.model import ModelConfig
from homeostat.errors import ModelError
from homeostat.ops.held import HeldLinear, HeldWeight
from homeostat.precision.int8 import Int8Weight
from homeostat.precision.layers import Choice, ModelLayer, layers_of, replace_module
from homeostat.precision.nf4 import Nf4Weight

Rewrite = Callable[[nn.Module, torch.dtype], None]


def base_rewrite(model: ModelConfig, *, values: torch.dtype | None = None) -> Rewrite | None:
    """Return what exchanges the linear maps of a decoder; None if its weights stay as they are.

    `values` is the dtype of the run that the base was quantised in, if products are computed in
    another one: the base has the same codes and values then.
    """
    if model.quantization is None:
        return None

    def rewrite(module: nn.Module, dtype: torch.dtype) -> None:
        hold_linear_maps(module, model, dtype=dtype, values=values)

    return rewrite


def hold_linear_maps(
    module: nn.Module,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    values: torch.dtype | None = None,
) -> None:
    """Exchange the linear maps of a module on the meta device, before it has weights."""
    for layer in layers_of(module):
        if layer.kind == "experts":
            raise ModelError(
                f"model.quantization: {layer.name} is a stack of experts, which cannot be held in "
                f"{model.quantization}. Remove model.quantization, or use a model without experts."
            )
        # A router is a matrix of its own kind, and small; it stays as it is.
        if layer.kind != "linear" or not isinstance(layer.module, nn.Linear):
            continue
        with torch.device("meta"):
            held = _held(model, layer.module.weight.shape, dtype, values or dtype)
        replace_module(module, layer.name, HeldLinear(layer.module, held))


def base_choices(module: nn.Module) -> list[Choice]:
    """Return every layer, and why it is not held in few bits."""
    why = "embeddings, routers and the output matrix keep their precision"
    return [Choice(layer, "" if layer.kind == "linear" else why) for layer in layers_of(module)]


def held_bytes(model: ModelConfig, layer: ModelLayer, dtype: torch.dtype) -> int:
    """Return the bytes of a layer's codes and scales."""
    with torch.device("meta"):
        held = _held(model, layer.weights["weight"].shape, dtype, dtype)
    return sum(tensor.nbytes for tensor in (*held.parameters(), *held.buffers()))


def _held(
    model: ModelConfig, shape: torch.Size, dtype: torch.dtype, values: torch.dtype
) -> HeldWeight:
    how = {"dtype": dtype, "values": values}
    if model.quantization == "nf4":
        return Nf4Weight(shape, double=model.double_quantization, **how)
    return Int8Weight(shape, **how)
