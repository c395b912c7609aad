"""FP8 numbers and their scales: the reference that every device's quantisation equals bitwise.

    largest = max |x| of a block, at least SMALLEST
    scale   = largest / F                  F: the largest number of the format, 448 or 57344
    value   = round(clamp(x * (F / largest), -F, F))      to the nearest, ties to even
    x ~ value * scale

All of it is fp32, with one rounding for each operation, so that a CPU and a GPU agree. With powers
of two, the scale is rounded up to one and the product with its inverse is exact.

A block of zeros has values of 0 and a small scale: nothing is divided by 0. A block that holds a
number that is not finite is NaN as a whole, scale included, so that no such number is hidden. Under
a scale that was given (delayed scaling), that number alone is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from homeostat.precision.recipe import E4M3, Block

# The smallest largest number of a block: its scale, its inverse and all products are normal fp32.
SMALLEST = 2.0**-100
# One bit below the exponent of an fp32 number, and all of its exponent.
_MANTISSA, _EXPONENT = 0x007FFFFF, 0x7F800000
# Exponents of a power of two and of its inverse add up to this.
_INVERSE = 254 << 23


@dataclass(frozen=True, slots=True)
class Quantised:
    """FP8 values with the shape of what was quantised, and a scale for each block of them.

    `scales` has the shape of the grid of blocks, [..., rows / block rows, columns / block columns].
    """

    values: Tensor
    scales: Tensor
    block: Block


def largest_of(dtype: torch.dtype) -> float:
    """Return the largest finite number of a format."""
    return torch.finfo(dtype).max


def quantise(
    x: Tensor,
    *,
    block: Block,
    dtype: torch.dtype = E4M3,
    power_of_two: bool = False,
    amax: Tensor | None = None,
) -> Quantised:
    """Quantise the last two dimensions of a tensor by blocks; those at the end may be smaller.

    `amax`: the largest number to be expected, in place of that of `x` (one for the whole tensor).
    """
    tiles = _tiles(x.float(), block)
    largest = tiles.abs().amax(dim=(-3, -1)) if amax is None else amax.float().expand(1, 1)
    scales, inverses = scales_of(largest, dtype=dtype, power_of_two=power_of_two)
    scaled = tiles * _over_tiles(inverses)
    limit = largest_of(dtype)
    # What is not finite, by itself or by its block's scale, becomes the one positive NaN.
    whole = torch.where(scaled.abs() < torch.inf, scaled.clamp(-limit, limit), torch.nan)
    return Quantised(_untiled(whole.to(dtype), x.shape), scales, block)


def dequantise(quantised: Quantised) -> Tensor:
    """Return fp32 numbers, each rounded once."""
    values = quantised.values
    tiles = _tiles(values.float(), quantised.block) * _over_tiles(quantised.scales)
    return _untiled(tiles, values.shape)


def scales_of(
    amax: Tensor, *, dtype: torch.dtype, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the scales of blocks by their largest numbers, and what blocks are multiplied by."""
    largest = amax.clamp_min(SMALLEST)
    # A tensor: a GPU divides by a Python number by multiplying with its rounded inverse.
    limit = torch.full_like(largest, largest_of(dtype))
    scales, inverses = torch.div(largest, limit), torch.div(limit, largest)
    if power_of_two:
        bits = (scales.view(torch.int32) + _MANTISSA) & _EXPONENT
        scales, inverses = bits.view(torch.float32), (_INVERSE - bits).view(torch.float32)
    is_finite = largest < torch.inf
    return scales.where(is_finite, torch.nan), inverses.where(is_finite, torch.nan)


def _sizes(shape: torch.Size, block: Block) -> tuple[int, int]:
    """Return the rows and columns of a block, for a tensor of this shape."""
    rows, columns = block
    return rows or max(shape[-2], 1), columns or max(shape[-1], 1)


def _tiles(x: Tensor, block: Block) -> Tensor:
    """Return a view [..., R, rows, C, columns] of the tensor, padded with zeros to whole blocks."""
    rows, columns = _sizes(x.shape, block)
    short = -x.shape[-2] % rows, -x.shape[-1] % columns
    if any(short):
        # A dtype of one byte cannot be padded on every device: only fp32 comes here.
        x = functional.pad(x, (0, short[1], 0, short[0]))
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _untiled(tiles: Tensor, shape: torch.Size) -> Tensor:
    whole = tiles.flatten(-2).flatten(-3, -2)
    return whole[..., : shape[-2], : shape[-1]].contiguous()


def _over_tiles(scales: Tensor) -> Tensor:
    return scales.unsqueeze(-2).unsqueeze(-1)
