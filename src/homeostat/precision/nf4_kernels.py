"""Convert NF4 codes to values in one pass, by a kernel, with the bits of precision/nf4.py.

Suffixes: `_P` packed bytes, `_B` blocks, `_C` codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import launches

# Bytes that a program unpacks, two values each.
_BYTES = 1024


@triton.jit
def _dequantise(packed_ptr, absmax_ptr, book_ptr, out_ptr, num_values, BYTES: tl.constexpr):
    at_P = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    packed = tl.load(packed_ptr + at_P, mask=at_P * 2 < num_values, other=0).to(tl.int32)
    # A block has 64 values, which are 32 bytes.
    scale = tl.load(absmax_ptr + at_P // 32, mask=at_P * 2 < num_values, other=0.0)
    first = tl.load(book_ptr + (packed >> 4)) * scale
    second = tl.load(book_ptr + (packed & 15)) * scale
    at = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    values = tl.interleave(first, second).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, values, mask=at < num_values)


def dequantised(
    packed_P: Tensor, absmax_B: Tensor, book_C: Tensor, *, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Return the values, [shape]."""
    out = torch.empty(shape, dtype=dtype, device=packed_P.device)
    if launches(packed_P):
        grid = (triton.cdiv(len(packed_P), _BYTES),)
        _dequantise[grid](packed_P, absmax_B, book_C, out, shape.numel(), BYTES=_BYTES)
    return out
