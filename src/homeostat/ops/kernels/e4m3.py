"""Numbers in e4m3 inside Triton kernels: scales and rounding, as precision/fp8.py defines them.

A scale is shared by BLOCK neighbours of a row ("blockwise"), or by the whole row. What a kernel
casts has the bits of what `precision.fp8` casts, so that an engine's activations are the trainer's.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Neighbours that share a scale.
BLOCK = tl.constexpr(128)
LARGEST = tl.constexpr(448.0)
# As precision.fp8's: the inverse of a scale stays an ordinary number.
SMALLEST = tl.constexpr(2.0**-100)
# Triton's interpreter cuts digits off where a GPU rounds to the nearest number.
_CUTS_DIGITS = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def to_e4m3(x):
    """Round fp32 of at most LARGEST to the nearest e4m3 number, ties to even."""
    if _CUTS_DIGITS:
        bits = x.to(tl.int32, bitcast=True)
        power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        # Adding it leaves the digits that e4m3 has; below 2 ** -6 their spacing is constant.
        magic = tl.maximum(power, 0.015625) * 1572864.0
        x = tl.where(bits < 0, -tl.abs((x + magic) - magic), (x + magic) - magic)
    return x.to(tl.float8e4nv)


@triton.jit
def scales_of(amax, POWER_OF_TWO: tl.constexpr):
    """Return scales by the largest magnitudes, and what numbers are multiplied by.

    Numbers that are not finite stay so: their products are NaN.
    """
    largest = tl.maximum(amax, SMALLEST)
    scale, inverse = tl.math.div_rn(largest, LARGEST), tl.math.div_rn(LARGEST, largest)
    if POWER_OF_TWO:
        bits = (scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
        inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def amax_of_blocks(x, BLOCKWISE: tl.constexpr):
    """Return the largest magnitude that each of a row's blocks [blocks, BLOCK] shares a scale with:
    its own, or the whole row's."""
    amax = tl.max(tl.abs(x), 1)
    return amax if BLOCKWISE else tl.zeros_like(amax) + tl.max(amax, 0)


@triton.jit
def quantised_blocks(x, amax, POWER_OF_TWO: tl.constexpr):
    """Cast fp32 [blocks, BLOCK]: e4m3 numbers, and the scale of each block."""
    scale, inverse = scales_of(amax, POWER_OF_TWO)
    return to_e4m3(x * inverse[:, None]), scale
