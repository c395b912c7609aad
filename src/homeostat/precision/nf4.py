"""NF4, the 4-bit format of QLoRA (Dettmers et al. 2023, arXiv:2305.14314).

    values -> blocks of 64 -> value / largest magnitude of its block -> nearest of 16 codes

The codes are quantiles of a normal distribution, scaled to [-1, 1]. Two of them share a byte, the
first in the upper half. A matrix is flattened row by row, so that a block may reach over two rows.
With double quantisation the blocks' largest magnitudes (`absmax`) are held in 8 bits: less their
mean, in blocks of 256, by the nearest of 256 codes. Codes, packing and rounding are those of
bitsandbytes, bit for bit; of scales, its CPU kernel takes the second nearest code now and then.

Suffixes: `_C` codes of a book, `_B` blocks, `_P` packed bytes, `_N` values, `_O` outputs, `_K`
inputs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from homeostat.ops import kernels
from homeostat.ops.held import HeldWeight

BLOCK = 64
# Blocks whose largest magnitudes are quantised together.
BLOCKS_OF_SCALES = 256
CODES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Values that are quantised at a time, so that their fp32 copies stay small. A multiple of BLOCK.
_AT_A_TIME = 1 << 22


def num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK)


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed codes, uint8 [P], and the largest magnitude of each block, fp32 [B]."""
    flat_N = values.reshape(-1)
    parts = [_quantised(part_N) for part_N in flat_N.split(_AT_A_TIME)]
    return torch.cat([packed_P for packed_P, _ in parts]), torch.cat([sizes for _, sizes in parts])


def _quantised(flat_N: Tensor) -> tuple[Tensor, Tensor]:
    missing = -len(flat_N) % BLOCK
    padded_BN = nn.functional.pad(flat_N.float(), (0, missing)).view(-1, BLOCK)
    absmax_B = padded_BN.abs().amax(1)
    # A block of zeros has no scale; its values stay zero, whose code is exact.
    inverse_B = torch.where(absmax_B > 0, 1.0 / absmax_B, torch.zeros_like(absmax_B))
    codes_N = nearest(padded_BN * inverse_B[:, None], _book(flat_N.device)).view(-1)
    codes_N = codes_N[: len(flat_N) + len(flat_N) % 2]
    return (codes_N[0::2] << 4) | codes_N[1::2], absmax_B


def dequantise(
    packed_P: Tensor, absmax_B: Tensor, *, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Return the values, [shape]: code times the largest magnitude, in fp32, rounded once."""
    if kernels.fused(absmax_B):
        from homeostat.precision.nf4_kernels import dequantised

        return dequantised(packed_P, absmax_B, _book(packed_P.device), shape=shape, dtype=dtype)
    codes_N = torch.stack([packed_P >> 4, packed_P & 15], dim=1).view(-1)[: shape.numel()]
    values_N = _book(packed_P.device)[codes_N.int()]
    scales_N = absmax_B.repeat_interleave(BLOCK)[: shape.numel()]
    return (values_N * scales_N).to(dtype).view(shape)


def quantise_scales(absmax_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of the scales, uint8 [B], the scales of their blocks, and their mean."""
    mean = absmax_B.mean()
    missing = -len(absmax_B) % BLOCKS_OF_SCALES
    padded = nn.functional.pad(absmax_B - mean, (0, missing)).view(-1, BLOCKS_OF_SCALES)
    largest = padded.abs().amax(1)
    inverse = torch.where(largest > 0, 1.0 / largest, torch.zeros_like(largest))
    codes = nearest(padded * inverse[:, None], dynamic_book(absmax_B.device))
    return codes.view(-1)[: len(absmax_B)], largest, mean


def dequantise_scales(codes_B: Tensor, largest: Tensor, mean: Tensor) -> Tensor:
    """Return the scales, fp32 [B]."""
    whole = largest.repeat_interleave(BLOCKS_OF_SCALES)[: len(codes_B)]
    return dynamic_book(codes_B.device)[codes_B.int()] * whole + mean


def nearest(values: Tensor, book_C: Tensor) -> Tensor:
    """Return the number of the nearest code, uint8; in the middle between two, the lower one."""
    middles = (book_C[:-1] + book_C[1:]) / 2
    return torch.bucketize(values, middles).to(torch.uint8)


@cache
def _book(device: torch.device) -> Tensor:
    return torch.tensor(CODES, dtype=torch.float32, device=device)


@cache
def dynamic_book(device: torch.device) -> Tensor:
    """The 256 codes of signed numbers with an exponent of up to 7 bits, in order."""
    codes = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1)
        means = (10.0 ** (exponent - 6)) * (bounds[:-1] + bounds[1:]) / 2.0
        codes += means.tolist() + (-means).tolist()
    return torch.tensor(sorted(codes), dtype=torch.float32, device=device)


class Nf4Weight(HeldWeight):
    """A matrix in NF4: half a byte a value and 4 bytes a block, or 1 with `double`.

    `values` is the dtype that its values are rounded to, before and after quantising.
    """

    def __init__(
        self, shape: torch.Size, *, dtype: torch.dtype, values: torch.dtype, double: bool
    ) -> None:
        super().__init__()
        self.shape, self.dtype, self.values, self.double = shape, dtype, values, double
        blocks = num_blocks(shape.numel())
        self.packed = _frozen(-(-shape.numel() // 2), torch.uint8)
        if double:
            self.scale_codes = _frozen(blocks, torch.uint8)
            self.scale_sizes = _frozen(-(-blocks // BLOCKS_OF_SCALES), torch.float32)
            self.scale_mean = _frozen(1, torch.float32)
        else:
            self.absmax = _frozen(blocks, torch.float32)

    def tensor(self) -> Tensor:
        how = {"shape": self.shape, "dtype": self.values}
        return dequantise(self.packed, self._scales(), **how).to(self.dtype)

    def _scales(self) -> Tensor:
        if not self.double:
            return self.absmax
        return dequantise_scales(self.scale_codes, self.scale_sizes, self.scale_mean)

    @torch.no_grad()
    def take(self, weight_OK: Tensor) -> None:
        # Rounded to the model's dtype first, as if the model had been loaded whole.
        weight_OK = weight_OK.to(device=self.packed.device, dtype=self.values)
        packed_P, absmax_B = quantise(weight_OK)
        self.packed.copy_(packed_P)
        if not self.double:
            self.absmax.copy_(absmax_B)
            return
        codes, sizes, mean = quantise_scales(absmax_B)
        self.scale_codes.copy_(codes)
        self.scale_sizes.copy_(sizes)
        self.scale_mean.copy_(mean)


def _frozen(size: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
