"""Round weights to what INT4 holds, in one pass over them (precision/int4.py is the reference)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import launches

# Groups that a program rounds at a time.
_GROUPS = 32
# Added to a small number and taken off again, it rounds to the nearest integer, halves to even.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def scales_of(largest, TINY: tl.constexpr):
    """Scales of five significant bits, rounded in integers."""
    bits = tl.div_rn(largest, 7.0).to(tl.int32, bitcast=True)
    bits += 0x3FFFF + ((bits >> 19) & 1)
    scales = ((bits >> 19) << 19).to(tl.float32, bitcast=True)
    return tl.where(largest < TINY, 1.0, scales)


@triton.jit
def _round_groups(
    weight_ptr,
    out_ptr,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TINY: tl.constexpr,
):
    at_G = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = at_G[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_in = (at_G < num_groups)[:, None]
    weight = tl.load(weight_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    size = tl.abs(weight)
    # A maximum may pass over NaN, so that what is not finite is counted.
    num_odd = tl.sum((size < float("inf")).to(tl.int32), 1) < GROUP
    largest = tl.where(num_odd, 0.0, tl.max(size, 1))
    scales = scales_of(largest, TINY)[:, None]
    rounded = (tl.div_rn(weight, tl.broadcast_to(scales, (GROUPS, GROUP))) + _ROUNDER) - _ROUNDER
    out = tl.where(num_odd[:, None], float("nan"), rounded * scales)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_in)


def round_groups(weight: Tensor, out: Tensor, *, group_size: int) -> Tensor:
    """Write the rounded weight to `out`, which is contiguous, and return it."""
    weight, num_groups = weight.contiguous(), weight.numel() // group_size
    assert out.is_contiguous(), out.stride()
    if launches(weight):
        grid = (triton.cdiv(num_groups, _GROUPS),)
        _round_groups[grid](
            weight, out, num_groups, GROUP=group_size, GROUPS=_GROUPS, TINY=2.0**-100
        )
    return out
