"""Experts in host memory, streamed to the device layer by layer.

    host     the experts of all layers, pinned; their gradients and their optimizer state
    device   two slots, each with room for the experts of one layer

    fetch(layer)   its slot holds the layer; meanwhile the layer that comes next is copied into the
                   other slot by a side stream

A forward pass asks for the layers in order and a backward pass in reverse, so the next layer is one
further in the direction of the last two. Layer n always uses slot n % 2: autograd keeps the slot's
memory, not a copy of it. By the time of the backward pass a slot holds another layer, and the
gradient of a layer's output fetches the layer again. Whether layers are recomputed does not matter.

Invariants: a slot is written only after all that was launched to read it, and read only after it
was written; products and operands are the same as without, so bits are, too. The optimizer writes
host memory between passes, so a pass never uses what an earlier one left in the slots.

Suffixes: `_N` packed tokens, `_D` model dim, `_K` slots of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from homeostat.errors import ModelError
from homeostat.models.decoder import Decoder
from homeostat.models.moe import Experts
from homeostat.ops.experts import experts_of
from homeostat.ops.moe_shape import MoeShape
from homeostat.ops.transfer import SideStream

HOST = torch.device("cpu")
NUM_SLOTS = 2


def require_experts(shape: MoeShape | None) -> None:
    """Raise ModelError if there is nothing to keep in host memory."""
    if shape is None:
        raise ModelError(
            "trainer.backend.offload_experts is set, and the model of model.path has no experts "
            "(or transformers computes them), so it would have no effect. Remove it."
        )


def stream_experts(decoder: Decoder, *, device: torch.device) -> None:
    """Let a decoder whose experts are in host memory compute on `device`."""
    blocks = decoder.moe_blocks
    for block in blocks:
        for parameter in block.experts.parameters():
            assert parameter.device == HOST, parameter.device
            if device.type == "cuda":
                # A copy from pageable memory would wait for the device.
                parameter.data = parameter.data.pin_memory()
    stream = ExpertStream([block.experts for block in blocks], device=device)
    for number, block in enumerate(blocks):
        block.experts = StreamedExperts(block.experts, stream, number=number)


class StreamedExperts(Experts):
    """The experts of layer `number`: the parameters are in host memory, and a slot computes."""

    def __init__(self, experts: Experts, stream: ExpertStream, *, number: int) -> None:
        nn.Module.__init__(self)
        self.numerics, self.kernel = experts.numerics, experts.kernel
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.stream, self.number = stream, number

    def forward(self, x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        if self.number == 0:
            self.stream.start_pass()
        slot = self.stream.fetch(self.number)
        hosts = self.gate_up_proj, self.down_proj
        here = [_OnDevice.apply(host, place) for host, place in zip(hosts, slot, strict=True)]
        how = {"numerics": self.numerics, "kernel": self.kernel}
        out_ND = experts_of(x_ND, ids_NK, weights_NK, *here, **how)
        if out_ND.requires_grad:
            out_ND.register_hook(self._fetch_again)
        return out_ND

    def _fetch_again(self, grad_ND: Tensor) -> None:
        """Called before the gradient goes through the layer."""
        self.stream.fetch(self.number)


class ExpertStream:
    """Copies the experts of one layer after the other into two slots on the device."""

    def __init__(self, layers: Sequence[Experts], *, device: torch.device) -> None:
        self._hosts = [(layer.gate_up_proj, layer.down_proj) for layer in layers]
        self._slots = [
            tuple(torch.empty_like(host, device=device, requires_grad=False) for host in pair)
            for pair in self._hosts[:NUM_SLOTS]
        ]
        self._side = SideStream(device)
        # Slot -> the event that follows its last copy.
        self._copied: dict[int, Any] = {}
        # Slot -> the layer that it holds or is about to hold.
        self._held: dict[int, int] = {}
        self._last = -1

    def start_pass(self) -> None:
        """Forget what the slots hold: an update may have changed the experts since."""
        self._held.clear()
        self._last = -1

    def fetch(self, layer: int) -> tuple[Tensor, ...]:
        """Return the slot that holds the layer, and begin to copy the one that comes next."""
        self._require(layer)
        self._wait(layer % NUM_SLOTS)
        if layer != self._last:
            following = layer + (-1 if layer == self._last - 1 else 1)
            self._last = layer
            if 0 <= following < len(self._hosts):
                self._require(following)
        return self._slots[layer % NUM_SLOTS]

    def _require(self, layer: int) -> None:
        slot = layer % NUM_SLOTS
        if self._held.get(slot) != layer:
            self._held[slot] = layer
            self._copy(layer, slot)

    def _copy(self, layer: int, slot: int) -> None:
        # What was launched before this may still read the slot.
        self._copied[slot] = self._side.run(lambda: self._fill(layer, slot))

    def _fill(self, layer: int, slot: int) -> None:
        for place, host in zip(self._slots[slot], self._hosts[layer], strict=True):
            # Through `data`, for autograd holds that memory: it has the right values again by the
            # time that it is read.
            place.data.copy_(host.data, non_blocking=True)

    def _wait(self, slot: int) -> None:
        self._side.wait(self._copied[slot])


class _OnDevice(torch.autograd.Function):
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
