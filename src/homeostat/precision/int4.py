"""Weights in INT4: groups of neighbours share a scale, and zero stays zero.

    quantise       weights -> integers from -7 to 7, and a scale per group
    fake_quantise  weights -> the same weights rounded to what INT4 can hold, in their own dtype
    pack           integers -> eight to an int32, as compressed-tensors stores them

A group is `group_size` neighbours along the inputs of a row. Its scale is its largest magnitude
divided by 7, rounded to five significant bits. So an integer times its scale has at most eight
significant bits, and is exact in bf16, fp16 and fp32: whoever multiplies, in whatever order and
dtype, gets the same weight. The largest magnitude of a group always becomes 7, so that quantising
what was quantised before changes nothing.

A group whose weights are all zero, or smaller than 2^-100, becomes zeros. A group with an infinity
or a NaN becomes NaN, so that it is noticed. The functions are plain torch; `fake_quantise` has a
kernel on a GPU (ops/kernels/int4.py) that gives the same bits.

Suffixes: `_G` groups of a row, `_K` inputs, `_W` words of eight packed integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from homeostat.errors import ModelError
from homeostat.ops import kernels

# The largest integer: the range is symmetric, and -8 is left unused.
LARGEST = 7
# Integers in a word, and what is added to them so that they are not negative.
PER_WORD, OFFSET = 8, 8
# Group sizes that vLLM's kernels read, from the finest to the coarsest.
GROUP_SIZES = (32, 64, 128)
# Groups whose weights are smaller become zeros: their scale would be no normal number.
TINY = 2.0**-100
# fp32 bits that a scale does not have: it keeps five significant ones.
_DROPPED = 19


@dataclass(frozen=True, slots=True)
class Quantised:
    """Integers [..., K] from -7 to 7 as int8, and a scale for each group [..., G] in fp32."""

    values_K: Tensor
    scales_G: Tensor


def fits(num_inputs: int, group_size: int) -> bool:
    """Return whether a row of so many inputs is a whole number of groups."""
    return num_inputs % group_size == 0


def quantise(weight: Tensor, *, group_size: int, name: str = "a weight") -> Quantised:
    """Return the integers and scales of a weight. Raise ModelError where it is not finite."""
    rounded, scales, is_finite = _rounded(weight, group_size)
    if not bool(is_finite.all()):
        raise ModelError(
            f"{name} holds numbers that are not finite, and INT4 cannot hold them. Go back to an "
            "earlier checkpoint."
        )
    return Quantised(rounded.to(torch.int8).flatten(-2), scales.squeeze(-1))


def dequantise(quantised: Quantised, *, dtype: torch.dtype) -> Tensor:
    """Return the weights that integers and scales stand for: exact in bf16, fp16 and fp32."""
    values, scales = quantised.values_K, quantised.scales_G
    grouped = values.unflatten(-1, (scales.shape[-1], -1)).float() * scales[..., None]
    return grouped.flatten(-2).to(dtype)


@torch.no_grad()
def fake_quantise(weight: Tensor, *, group_size: int, out: Tensor | None = None) -> Tensor:
    """Return the weight rounded to what INT4 holds, in its own dtype. Not differentiable.

    The same values as `dequantise(quantise(weight))`; a group that is not finite becomes NaN.
    """
    out = torch.empty_like(weight, memory_format=torch.contiguous_format) if out is None else out
    if kernels.fused(weight):
        from homeostat.ops.kernels.int4 import round_groups

        return round_groups(weight, out, group_size=group_size)
    rounded, scales, is_finite = _rounded(weight, group_size)
    # Adding zero turns -0 into 0, which is what an integer gives.
    values = torch.where(is_finite, (rounded + 0.0) * scales, math.nan)
    return out.copy_(values.flatten(-2))


def straight_through(weight: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, whose gradient goes to `weight` unchanged."""
    return _StraightThrough.apply(weight, rounded)


def pack(values_K: Tensor) -> Tensor:
    """Return int32 [..., W]: eight integers to a word, the first in the lowest four bits."""
    shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32, device=values_K.device)
    nibbles = (values_K.to(torch.int32) + OFFSET).unflatten(-1, (-1, PER_WORD))
    return (nibbles << shifts).sum(-1, dtype=torch.int32)


def unpack(packed_W: Tensor) -> Tensor:
    """Return the integers of packed words as int8 [..., K]."""
    shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32, device=packed_W.device)
    nibbles = (packed_W[..., None] >> shifts) & 15
    return (nibbles - OFFSET).to(torch.int8).flatten(-2)


def _rounded(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers in fp32 [..., G, group], scales [..., G, 1], and where both are finite."""
    assert fits(weight.shape[-1], group_size), (tuple(weight.shape), group_size)
    grouped = weight.detach().float().unflatten(-1, (-1, group_size))
    largest = grouped.abs().amax(-1, keepdim=True)
    is_finite = largest < math.inf
    scales = scales_of(torch.where(is_finite, largest, 0.0))
    return torch.round(grouped / scales), scales, is_finite


def scales_of(largest: Tensor) -> Tensor:
    """Return the scales of groups with these largest magnitudes: fp32 of five significant bits."""
    bits = (largest / LARGEST).view(torch.int32)
    # Round half to even in integers, which has the same result on every device.
    half = (1 << (_DROPPED - 1)) - 1
    bits = bits + half + ((bits >> _DROPPED) & 1)
    scales = ((bits >> _DROPPED) << _DROPPED).view(torch.float32)
    return torch.where(largest < TINY, 1.0, scales)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None
