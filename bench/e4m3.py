"""A decoder whose linear maps really compute with e4m3 numbers, as an FP8 engine's do.

    weights       cast once to torch.float8_e4m3fn, one scale for each block of 128 x 128
    activations   cast at every call, one scale for each row
    products      of the numbers that were cast, with fp32 sums

Router, norms, embedding and output matrix stay as they are, which is what engines do. The products
are computed in the model's dtype because a CPU has none for FP8: what is lost is what the casts
lose.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from homeostat.models.decoder import Decoder
from homeostat.models.moe import Experts
from homeostat.ops.activations import gated_silu
from homeostat.ops.experts import combined
from homeostat.ops.linear import Linear, linear

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def cast(x: Tensor, largest: Tensor) -> Tensor:
    """Return x as e4m3 holds it, scaled so that its largest magnitude is the largest number."""
    scale = largest.clamp(min=1e-12) / LARGEST
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def by_rows(x: Tensor) -> Tensor:
    return cast(x, x.abs().amax(dim=-1, keepdim=True))


def by_blocks(weight: Tensor) -> Tensor:
    """Cast the last two dimensions of a weight in blocks."""
    for start in range(0, weight.shape[-2], BLOCK):
        for first in range(0, weight.shape[-1], BLOCK):
            block = weight[..., start : start + BLOCK, first : first + BLOCK]
            block.copy_(cast(block, block.abs().amax(dim=(-2, -1), keepdim=True)))
    return weight


class E4m3Linear(Linear):
    """A linear map of a row that was cast."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(by_rows(x), self.weight, self.bias)


class E4m3Experts(Experts):
    """Experts of rows that were cast, before each of the two products."""

    def forward(self, x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        x_ND = by_rows(x_ND)
        out_NKD = x_ND.new_zeros((*ids_NK.shape, x_ND.shape[1]))
        for expert in ids_NK.unique().tolist():
            token_m, slot_m = (ids_NK == expert).nonzero(as_tuple=True)
            gate_mI, up_mI = linear(x_ND[token_m], self.gate_up_proj[expert]).chunk(2, dim=1)
            gated_mI = by_rows(gated_silu(gate_mI, up_mI))
            out_NKD[token_m, slot_m] = linear(gated_mI, self.down_proj[expert])
        return combined(out_NKD, weights_NK)


@torch.no_grad()
def in_e4m3(model: Decoder) -> Decoder:
    """Return a copy of a model that computes its linear maps in e4m3."""
    found = copy.deepcopy(model).requires_grad_(False)
    for name, module in found.named_modules():
        if isinstance(module, Linear) and name != "lm_head":
            by_blocks(module.weight)
            module.__class__ = E4m3Linear
        elif isinstance(module, Experts):
            by_blocks(module.gate_up_proj)
            by_blocks(module.down_proj)
            module.__class__ = E4m3Experts
    return found
