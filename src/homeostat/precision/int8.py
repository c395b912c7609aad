"""8-bit weights with one scale a row: value = code * scale, codes from -127 to 127.

Suffixes: `_O` outputs, `_K` inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from homeostat.ops.held import HeldWeight

LARGEST = 127


def quantise(weight_OK: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, int8 [O, K], and the scale of each row, fp32 [O]."""
    wide_OK = weight_OK.float()
    scale_O = wide_OK.abs().amax(1) / LARGEST
    # A row of zeros has no scale; its values stay zero.
    inverse_O = torch.where(scale_O > 0, 1.0 / scale_O, torch.zeros_like(scale_O))
    codes_OK = (wide_OK * inverse_O[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return codes_OK.to(torch.int8), scale_O


def dequantise(codes_OK: Tensor, scale_O: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the weight: the product in fp32, rounded once."""
    return (codes_OK.float() * scale_O[:, None]).to(dtype)


class Int8Weight(HeldWeight):
    """A matrix in 8 bits: a byte a value, and 4 bytes a row.

    `values` is the dtype that its values are rounded to, before and after quantising.
    """

    def __init__(self, shape: torch.Size, *, dtype: torch.dtype, values: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype, self.values = shape, dtype, values
        self.codes = nn.Parameter(torch.empty(shape, dtype=torch.int8), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(shape[0]), requires_grad=False)

    def tensor(self) -> Tensor:
        return dequantise(self.codes, self.scales, dtype=self.values).to(self.dtype)

    @torch.no_grad()
    def take(self, weight_OK: Tensor) -> None:
        # Rounded to the model's dtype first, as if the model had been loaded whole.
        codes_OK, scale_O = quantise(weight_OK.to(device=self.codes.device, dtype=self.values))
        self.codes.copy_(codes_OK)
        self.scales.copy_(scale_O)
