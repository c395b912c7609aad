"""Packs the kept sets of a burst end to end on the device, so that little is copied to the host.

Suffixes: `_S` steps of a burst, `_B` rows, `_K` ids of a set.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Ids that a program copies at a time.
_IDS = 128


@triton.jit
def _pack(
    kept_ptr, ends_ptr, out_ptr, num_steps, step_stride, row_stride, room,
    IDS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row, step = token // num_steps, token % num_steps
    end = tl.load(ends_ptr + token)
    start = tl.load(ends_ptr + token - 1, mask=token > 0, other=0)
    from_ptr = kept_ptr + step.to(tl.int64) * step_stride + row.to(tl.int64) * row_stride
    for first in range(0, (end - start).to(tl.int32), IDS):
        at = first + tl.arange(0, IDS)
        is_in = (start + at < end) & (start + at < room)
        tl.store(out_ptr + start + at, tl.load(from_ptr + at, mask=is_in, other=0), mask=is_in)


def pack_sets(kept_SBK: Tensor, sizes_SB: Tensor, *, room: int) -> Tensor:
    """Return the first `room` ids of all sets, row by row. A set has no more ids than its width."""
    num_steps, num_rows, width = kept_SBK.shape
    ends_T = sizes_SB.t().clamp(max=width).reshape(-1).cumsum(0, dtype=torch.int64)
    out = torch.empty(room, dtype=kept_SBK.dtype, device=kept_SBK.device)
    _pack[(num_rows * num_steps,)](
        kept_SBK, ends_T, out, num_steps, kept_SBK.stride(0), kept_SBK.stride(1), room,
        IDS=_IDS, num_warps=1,
    )  # fmt: skip
    return out
