"""Dequantises packed INT4 weights in one pass: the rows of a prompt are multiplied by the result.

Suffixes: `_O` outputs, `_W` words, `_G` groups.
"""

# Triton compiles its kernels from source: pyright misreads their calls.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda.int4_narrow import plane_of

if TYPE_CHECKING:
    from homeostat.rollout.native.cuda.int4_layout import Int4Matrix

# Outputs that a program dequantises of a block.
_OUTPUTS = 16


@triton.jit
def _dense(
    words_ptr, scales_ptr, out_ptr, num_outputs, num_inputs, num_blocks, scale_stride,
    GROUP: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    at_O = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_out = at_O < num_outputs
    at_word = (at_O[:, None].to(tl.int64) * num_blocks + block) * 32 + tl.arange(0, 32)[None, :]
    words = tl.load(words_ptr + at_word, mask=is_out[:, None], other=0)
    for plane in tl.static_range(8):
        start = block * 256 + plane * 32
        at_scale = (start // GROUP).to(tl.int64) * scale_stride + at_O
        scales = tl.load(scales_ptr + at_scale, mask=is_out, other=0.0).to(tl.float32)[:, None]
        # 24 + q times the scale, less 24 scales: exactly q times the scale.
        weight = plane_of(words, plane) * scales - 24.0 * scales
        at_K = start + tl.arange(0, 32)
        at = at_O[:, None].to(tl.int64) * num_inputs + at_K[None, :]
        is_in = is_out[:, None] & (at_K < num_inputs)[None, :]
        tl.store(out_ptr + at, weight.to(out_ptr.dtype.element_ty), mask=is_in)


def dense(words_OW: Tensor, scales_GO: Tensor, matrix: Int4Matrix, *, dtype: torch.dtype) -> Tensor:
    """Return [O, K] of some rows of a matrix, which `words` and `scales` are views of."""
    num_outputs, num_blocks = len(words_OW), matrix.num_blocks
    out_OK = torch.empty(num_outputs, matrix.num_inputs, dtype=dtype, device=words_OW.device)
    _dense[(triton.cdiv(num_outputs, _OUTPUTS), num_blocks)](
        words_OW,
        scales_GO,
        out_OK,
        num_outputs,
        matrix.num_inputs,
        num_blocks,
        scales_GO.stride(0),
        GROUP=matrix.group_size,
        OUTPUTS=_OUTPUTS,
    )
    return out_OK
