"""Weights in host memory, streamed to the device layer by layer.

    host     the weights of all layers, pinned
    device   two slots, each with room for the weights of one layer

    fetch(layer)   its slot holds the layer; meanwhile the layer that comes next is copied into the
                   other slot by a side stream

A forward pass asks for the layers in order and a backward pass in reverse, so the next layer is one
further in the direction of the last two. Layer n always uses slot n % 2: autograd keeps the slot's
memory, not a copy of it. By the time of the backward pass a slot holds another layer, and the
gradient of a layer's output fetches the layer again. Whether layers are recomputed does not matter.

Invariants: a slot is written only after all that was launched to read it, and read only after it
was written; products and operands are the same as without streaming, so the bits are the same, too.
The optimizer writes host memory between passes, so a pass never uses what an earlier one left in
the slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from homeostat.ops.host_memory import HOST, HostMemory, aligned
from homeostat.ops.transfer import SideStream

NUM_SLOTS = 2


def pin_all(parameters: Iterable[Tensor], *, device: torch.device) -> None:
    """Pin parameters in host memory: a copy from pageable memory would wait for the device."""
    memory = HostMemory(pinned=device.type == "cuda")
    for parameter in parameters:
        assert parameter.device == HOST, parameter.device
        # Roles may share what is frozen.
        if device.type != "cuda" or not parameter.data.is_pinned():
            parameter.data = memory.keep(parameter.data)


def slot_bytes(layers: Sequence[Sequence[Tensor]]) -> int:
    """Return the bytes that the device holds for these layers."""
    largest = max((sum(aligned(tensor.nbytes) for tensor in layer) for layer in layers), default=0)
    return min(len(layers), NUM_SLOTS) * largest


class WeightStream:
    """Copies the weights of one layer after the other into two slots on the device."""

    def __init__(self, layers: Sequence[Sequence[Tensor]], *, device: torch.device) -> None:
        self._hosts = [tuple(layer) for layer in layers]
        size = slot_bytes(layers) // max(1, min(len(layers), NUM_SLOTS))
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device) for _ in self._hosts[:NUM_SLOTS]
        ]
        # Layer -> its tensors in its slot.
        self._places = [
            _places(layer, self._buffers[number % NUM_SLOTS])
            for number, layer in enumerate(self._hosts)
        ]
        self._side = SideStream(device)
        # Slot -> the event that follows its last copy.
        self._copied: dict[int, Any] = {}
        # Slot -> the layer that it holds or is about to hold.
        self._held: dict[int, int] = {}
        self._last = -1

    def start_pass(self) -> None:
        """Forget what the slots hold: an update may have changed the weights since."""
        self._held.clear()
        self._last = -1

    def fetch(self, layer: int) -> tuple[Tensor, ...]:
        """Return the layer's tensors in its slot, and begin to copy the layer that comes next."""
        self._require(layer)
        self._wait(layer % NUM_SLOTS)
        if layer != self._last:
            following = layer + (-1 if layer == self._last - 1 else 1)
            self._last = layer
            if 0 <= following < len(self._hosts):
                self._require(following)
        return self._places[layer]

    def _require(self, layer: int) -> None:
        slot = layer % NUM_SLOTS
        if self._held.get(slot) != layer:
            self._held[slot] = layer
            self._copy(layer, slot)

    def _copy(self, layer: int, slot: int) -> None:
        # What was launched before this may still read the slot.
        self._copied[slot] = self._side.run(lambda: self._fill(layer))

    def _fill(self, layer: int) -> None:
        for place, host in zip(self._places[layer], self._hosts[layer], strict=True):
            # Through `data`, for autograd holds that memory: it has the right values again by the
            # time that it is read.
            place.data.copy_(host.data, non_blocking=True)

    def _wait(self, slot: int) -> None:
        self._side.wait(self._copied[slot])


class OnDevice(torch.autograd.Function):
    """The slot in place of the parameter; the gradient goes back to host memory."""

    @staticmethod
    def forward(ctx: Any, host: Tensor, slot: Tensor) -> Tensor:
        return slot.view_as(slot)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _to_host(grads[0]), None


def _to_host(grad: Tensor) -> Tensor:
    if grad.device == HOST:
        return grad
    host = torch.empty_like(grad, device=HOST, pin_memory=True)
    host.copy_(grad, non_blocking=True)
    # The optimizer adds it up in another thread of autograd, which knows of no stream.
    torch.cuda.current_stream(grad.device).synchronize()
    return host


def _places(layer: Sequence[Tensor], buffer: Tensor) -> tuple[Tensor, ...]:
    """Cut a slot into the tensors of a layer."""
    found, start = [], 0
    for tensor in layer:
        here = buffer[start : start + tensor.nbytes]
        found.append(here.view(tensor.dtype).view(tensor.shape))
        start += aligned(tensor.nbytes)
    return tuple(found)
