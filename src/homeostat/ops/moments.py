"""Moments of an optimizer in fp32, bf16 or 8 bits. Arithmetic on them is always in fp32.

fp32   as they are
bf16   rounded stochastically (ops/stochastic.py)
8bit   each block of 256 elements is divided by its largest magnitude (fp32) and replaced by the
       nearest of 256 code values. The code book is the dynamic one of Dettmers et al., 8-bit
       Optimizers via Block-wise Quantization (arXiv 2110.02861): seven decades below 1, the
       more values the closer to 1. First moments have signs, second moments do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from homeostat.config.optimizer import Moments
from homeostat.ops.stochastic import Noise, round_into

BLOCK = 256
_DECADES = 7


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of a tensor. `absmax` holds the scale of each block of 8-bit values."""

    values: Tensor
    absmax: Tensor | None = None
    signed: bool = True

    def part(self, start: int, stop: int) -> Moment:
        """Return the elements from `start` to `stop` of a flat moment, without copying them."""
        if self.absmax is None:
            return Moment(self.values[start:stop], None, self.signed)
        assert start % BLOCK == 0, start
        blocks = self.absmax[start // BLOCK : num_blocks(stop)]
        return Moment(self.values[start:stop], blocks, self.signed)


def num_blocks(num_elements: int) -> int:
    """Return the number of scales of that many 8-bit values."""
    return -(-num_elements // BLOCK)


def zero_moment(like: Tensor, kind: Moments, *, signed: bool, device: torch.device) -> Moment:
    """Return a moment of zeros for a tensor of that shape."""
    if kind != "8bit":
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        return Moment(torch.zeros(like.shape, dtype=dtype, device=device), signed=signed)
    zero = int((code_book(signed) == 0).nonzero())
    codes = torch.full(like.shape, zero, dtype=torch.uint8, device=device)
    scales = torch.zeros(num_blocks(like.numel()), dtype=torch.float32, device=device)
    return Moment(codes, scales, signed)


def read_moment(moment: Moment) -> Tensor:
    """Return the moment in fp32: the tensor itself if it is stored so."""
    if moment.absmax is None:
        return moment.values.float()
    codes = moment.values.reshape(-1)
    found = on_device(code_book(moment.signed), codes.device)[codes.int()]
    blocks = pad(found, (0, -len(found) % BLOCK)).view(-1, BLOCK)
    return (blocks * moment.absmax[:, None]).view(-1)[: len(found)].view(moment.values.shape)


def write_moment(moment: Moment, value: Tensor, *, noise: Noise) -> None:
    """Store fp32 values. bf16 is rounded by `noise`, the two moments of a tensor by other bits."""
    if moment.absmax is not None:
        codes, scales = encode(value.reshape(-1), signed=moment.signed)
        moment.values.copy_(codes.view(moment.values.shape))
        moment.absmax.copy_(scales)
    elif moment.values.dtype == torch.bfloat16:
        round_into(moment.values, value, noise, upper=not moment.signed)
    elif moment.values is not value:
        moment.values.copy_(value)


def encode(value: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes of a flat fp32 tensor and the scale of each block."""
    blocks = pad(value, (0, -len(value) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    # A block of zeros has no scale: its codes are those of 0.
    unit = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    codes = torch.bucketize(unit, on_device(code_bounds(signed), value.device), out_int32=True)
    return codes.view(-1)[: len(value)].to(torch.uint8), scales


@cache
def code_book(signed: bool) -> Tensor:
    """Return the 256 code values in ascending order, on the CPU."""
    found = [0.0, 1.0]
    for place in range(_DECADES):
        # Decade `place` has twice as many values as the one below it, spread evenly.
        count = 2 ** (place + (not signed))
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (place - _DECADES + 1)
        found += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted(found), dtype=torch.float64).float()


@cache
def code_bounds(signed: bool) -> Tensor:
    """Return the 255 midpoints between neighbouring code values, on the CPU."""
    book = code_book(signed)
    return (book[:-1] + book[1:]) / 2


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """Return a small constant table on a device, copied there once."""
    return _copy(table, device) if device.type != "cpu" else table


@cache
def _copy(table: Tensor, device: torch.device) -> Tensor:
    return table.to(device)
