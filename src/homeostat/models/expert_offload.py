"""Experts in host memory, streamed to the device layer by layer (models/weight_stream.py).

Their gradients and their optimizer state are in host memory, too.

Suffixes: `_N` packed tokens, `_D` model dim, `_K` slots of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from homeostat.errors import ModelError
from homeostat.models.decoder import Decoder
from homeostat.models.moe import Experts
from homeostat.models.weight_stream import OnDevice, WeightStream, pin_all
from homeostat.ops.experts import experts_of
from homeostat.ops.moe_shape import MoeShape


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
    parameters = (parameter for block in blocks for parameter in block.experts.parameters())
    pin_all(parameters, device=device)
    pairs = [(block.experts.gate_up_proj, block.experts.down_proj) for block in blocks]
    stream = WeightStream(pairs, device=device)
    for number, block in enumerate(blocks):
        block.experts = StreamedExperts(block.experts, stream, number=number)


class StreamedExperts(Experts):
    """The experts of layer `number`: the parameters are in host memory, and a slot computes."""

    def __init__(self, experts: Experts, stream: WeightStream, *, number: int) -> None:
        nn.Module.__init__(self)
        self.numerics, self.kernel = experts.numerics, experts.kernel
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.stream, self.number = stream, number

    def forward(self, x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        if self.number == 0:
            self.stream.start_pass()
        slot = self.stream.fetch(self.number)
        hosts = self.gate_up_proj, self.down_proj
        here = [OnDevice.apply(host, place) for host, place in zip(hosts, slot, strict=True)]
        how = {"numerics": self.numerics, "kernel": self.kernel}
        out_ND = experts_of(x_ND, ids_NK, weights_NK, *here, **how)
        if out_ND.requires_grad:
            out_ND.register_hook(self._fetch_again)
        return out_ND

    def _fetch_again(self, grad_ND: Tensor) -> None:
        """Called before the gradient goes through the layer."""
        self.stream.fetch(self.number)
