"""Dequantises packed INT4 weights in one pass: the rows of a prompt are multiplied by the result.

Suffixes: `_O` outputs, `_K` inputs, `_T` tiles, `_B` blocks, `_W` words, `_G` groups, `_P` outputs
of a tile (int4_layout.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _dense(
    words_ptr, scales_ptr, out_ptr, start, stop, num_inputs, num_blocks, num_groups,
    GROUP: tl.constexpr,
):  # fmt: skip
    tile, block = start // 16 + tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, 256)
    words = tl.load(words_ptr + (tile * num_blocks + block) * 256 + at)
    # Eight words of each thread, for two outputs and four inputs.
    output = tile * 16 + at // 32 + at // 4 % 2 * 8
    at_16 = at // 8 % 4 * 2 + at // 2 % 2 * 8 + at % 2
    for plane in tl.static_range(4):
        at_K = block * 64 + plane * 16 + at_16
        at_scale = (tile * num_groups + at_K // GROUP) * 16 + output % 16
        scales = tl.load(scales_ptr + at_scale).to(tl.float32)
        weight = (((words >> (4 * plane)) & 15).to(tl.float32) - 8.0) * scales
        is_in = (output >= start) & (output < stop) & (at_K < num_inputs)
        at_out = out_ptr + (output - start) * num_inputs + at_K
        tl.store(at_out, weight.to(out_ptr.dtype.element_ty), mask=is_in)


def dense(
    words_TBW: Tensor,
    scales_TGP: Tensor,
    start: int,
    stop: int,
    *,
    num_inputs: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the outputs [start, stop) of a packed matrix, [O, K]."""
    out_OK = words_TBW.new_empty(stop - start, num_inputs, dtype=dtype)
    num_blocks = words_TBW.shape[1]
    _dense[(triton.cdiv(stop, 16) - start // 16, num_blocks)](
        words_TBW,
        scales_TGP,
        out_OK,
        start,
        stop,
        num_inputs,
        num_blocks,
        scales_TGP.shape[1],
        GROUP=group_size,
        num_warps=1,
    )
    return out_OK
