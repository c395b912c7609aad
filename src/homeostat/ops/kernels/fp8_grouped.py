"""Block-scaled FP8 products of the rows of all (token, slot) pairs with their experts' matrices.

    out[s, o] = sum over blocks of 128 inputs:  (a[s, :] . b[e, o, :]) * scale_a * scale_b

A program computes one tile of one expert. The sum of a block of inputs is made by tensor cores,
scaled in fp32 and added to the sums before it, in order.

Suffixes: `_S` pairs by expert, `_E` experts, `_K` inputs, `_O` outputs, `_B` blocks of inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import launches
from homeostat.ops.kernels.pairs import tiles_of
from homeostat.ops.pairs import Pairs

_SIDE = 128


def grouped_fp8(
    a_SK: Tensor, a_scales_BS: Tensor, b_EOK: Tensor, b_scales_E: Tensor, pairs: Pairs
) -> Tensor:
    """Return [S, O] in bf16: each row by its expert's matrix. Rows of `a_SK` may be padded.

    `b_scales_E` is [E, O / 128, K / 128], its rows padded. Sizes but that of pairs divide by 128.
    """
    num_pairs, (_, num_outputs, num_inputs) = len(pairs.order_S), b_EOK.shape
    out_SO = torch.empty(num_pairs, num_outputs, dtype=torch.bfloat16, device=a_SK.device)
    if launches(out_SO):
        tiles_3T = tiles_of(pairs.ends_E, num_pairs, rows=_SIDE)
        grid = (num_outputs // _SIDE, tiles_3T.shape[1])
        _grouped_fp8[grid](
            a_SK, a_scales_BS, b_EOK, b_scales_E, out_SO, tiles_3T, num_outputs, num_inputs,
            a_scales_BS.shape[1], b_scales_E.stride(0), b_scales_E.stride(1), SIDE=_SIDE,
            num_warps=8, num_stages=4,
        )  # fmt: skip
    return out_SO


@triton.jit
def _grouped_fp8(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, out_ptr, tiles_ptr, num_outputs, num_inputs,
    num_a, expert_stride, block_stride, SIDE: tl.constexpr,
):  # fmt: skip
    tile, num_tiles = tl.program_id(1), tl.num_programs(1)
    expert = tl.load(tiles_ptr + tile)
    place = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, SIDE)
    is_row = place < tl.load(tiles_ptr + 2 * num_tiles + tile)
    if expert >= 0:
        # Beyond the expert's last row read the first one of all; its result is not stored.
        row = tl.where(is_row, place, 0)
        column = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
        at = tl.arange(0, SIDE)
        at_a = a_ptr + row[:, None].to(tl.int64) * num_inputs + at[None, :]
        at_b = (expert.to(tl.int64) * num_outputs + column[None, :]) * num_inputs + at[:, None]
        at_b = b_ptr + at_b
        at_a_scale = a_scales_ptr + row
        at_b_scale = b_scales_ptr + expert.to(tl.int64) * expert_stride
        at_b_scale += tl.program_id(0) * block_stride
        total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
        for _ in range(0, num_inputs, SIDE):
            scale = tl.load(at_a_scale) * tl.load(at_b_scale)
            total += tl.dot(tl.load(at_a), tl.load(at_b)) * scale[:, None]
            at_a += SIDE
            at_b += SIDE
            at_a_scale += num_a
            at_b_scale += 1
        at_out = out_ptr + place[:, None].to(tl.int64) * num_outputs + column[None, :]
        tl.store(at_out, total.to(tl.bfloat16), mask=is_row[:, None])
