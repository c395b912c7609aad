"""The matrices of all layers in host memory, streamed to the device layer by layer.

While a layer computes, its modules have the matrices of a slot in place of their parameters
(models/weight_stream.py); in between they have the parameters, under the same names and at the same
addresses. Vectors (norms, biases), the embedding and the output head stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from homeostat.config.cluster import OnHost
from homeostat.models.blocks import Layer
from homeostat.models.decoder import Decoder
from homeostat.models.weight_stream import OnDevice, WeightStream, pin_all
from homeostat.ops.host_memory import HOST


def layer_matrices(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the matrices of a layer: the module that has each, and its name there."""
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2:
                yield module, name, parameter


def stream_layers(decoder: Decoder, *, device: torch.device) -> None:
    """Let a decoder whose layers' matrices are in host memory compute on `device`."""
    layers = [[found[2] for found in layer_matrices(layer)] for layer in decoder.layers]
    pin_all((parameter for layer in layers for parameter in layer), device=device)
    stream = WeightStream(layers, device=device)
    for number, layer in enumerate(decoder.layers):
        StreamedLayer(layer, stream, number=number)


def allocate_on_host(decoder: Decoder, part: OnHost) -> None:
    """Allocate the matrices of experts, or of all layers, of a decoder on the meta device."""
    experts = [block.experts for block in decoder.moe_blocks]
    for owner in experts if part == "experts" else decoder.layers:
        for module, name, parameter in list(layer_matrices(owner)):
            made = torch.empty(parameter.shape, dtype=parameter.dtype, device=HOST)
            module._parameters[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)


class StreamedLayer:
    """Exchanges the matrices of layer `number` for those of its slot, whenever it computes."""

    def __init__(self, layer: Layer, stream: WeightStream, *, number: int) -> None:
        self.stream, self.number = stream, number
        self.matrices = list(layer_matrices(layer))
        layer.register_forward_pre_hook(self._enter)
        layer.register_forward_hook(self._leave, always_call=True)

    def _enter(self, layer: nn.Module, inputs: Any) -> None:
        if self.number == 0:
            self.stream.start_pass()
        places = self.stream.fetch(self.number)
        for (module, name, host), place in zip(self.matrices, places, strict=True):
            module._parameters[name] = OnDevice.apply(host, place)

    def _leave(self, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        for module, name, host in self.matrices:
            module._parameters[name] = host
        # The first gradient that comes to the layer is that of the update to the residual stream.
        if outputs is not None and outputs[1].requires_grad:
            outputs[1].register_hook(self._fetch_again)

    def _fetch_again(self, grad_ND: Tensor) -> None:
        """Called before the gradient goes through the layer."""
        self.stream.fetch(self.number)
