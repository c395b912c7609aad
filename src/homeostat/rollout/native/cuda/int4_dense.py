"""Dequantises packed INT4 weights in one pass: the rows of a prompt are multiplied by the result.

Suffixes: `_O` outputs, `_H` bytes of two integers each, `_G` groups, `_K` inputs.
"""

# Triton compiles its kernels from source: pyright misreads their calls.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from homeostat.rollout.native.cuda.int4_layout import Int4Matrix

# Outputs that a program dequantises of a block.
_OUTPUTS = 32


@triton.jit
def _dense(
    bytes_ptr, scales_ptr, out_ptr, num_outputs, num_inputs, num_blocks,
    GROUP: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    at_O = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_out, at_H = at_O < num_outputs, tl.arange(0, GROUP)
    at_byte = (at_O[:, None].to(tl.int64) * num_blocks + block) * GROUP + at_H[None, :]
    pairs = tl.load(bytes_ptr + at_byte, mask=is_out[:, None], other=0)
    for half in tl.static_range(2):
        group = block.to(tl.int64) * 2 + half
        at_scale = scales_ptr + at_O.to(tl.int64) * (2 * num_blocks) + group
        scales = tl.load(at_scale, mask=is_out, other=0.0).to(tl.float32)[:, None]
        nibbles = pairs & 15 if half == 0 else pairs >> 4
        weight = (nibbles.to(tl.float32) - 8.0) * scales
        at_K = group * GROUP + at_H
        at = at_O[:, None].to(tl.int64) * num_inputs + at_K[None, :]
        is_in = is_out[:, None] & (at_K < num_inputs)[None, :]
        tl.store(out_ptr + at, weight.to(out_ptr.dtype.element_ty), mask=is_in)


def dense(bytes_OH: Tensor, scales_OG: Tensor, matrix: Int4Matrix, *, dtype: torch.dtype) -> Tensor:
    """Return [O, K] of some rows of a matrix, which `bytes` and `scales` are views of."""
    num_outputs, num_blocks = len(bytes_OH), matrix.num_blocks
    out_OK = torch.empty(num_outputs, matrix.num_inputs, dtype=dtype, device=bytes_OH.device)
    _dense[(triton.cdiv(num_outputs, _OUTPUTS), num_blocks)](
        bytes_OH,
        scales_OG,
        out_OK,
        num_outputs,
        matrix.num_inputs,
        num_blocks,
        GROUP=matrix.group_size,
        OUTPUTS=_OUTPUTS,
    )
    return out_OK
