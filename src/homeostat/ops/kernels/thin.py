"""Products of two tall matrices, one of them thin: left^T @ right over many rows.

These are the gradients of an adapter's factors: as much reading as any product of such rows, and
hardly any arithmetic. A library takes as many programs as the small result has tiles, which are too
few to read at full speed. Here rows are shared out, each share leaves its sums in fp32, and these
are added in order.

Suffixes: `_M` rows, `_R` columns of the thin side, `_K` columns of the other, `_S` shares.
"""

# Triton compiles its kernels from source: pyright misreads their calls.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import launches

# Programs that keep a large GPU busy.
_PROGRAMS = 528
_ROWS, _COLUMNS = 64, 128


@triton.jit
def _thin(
    left_ptr, right_ptr, sums_ptr, num_rows, num_columns, left_stride, right_stride, rows_each,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(1)
    at_R, at_K = tl.arange(0, PADDED_RANK), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_rank, is_column = at_R < RANK, at_K < num_columns
    sums = tl.zeros((PADDED_RANK, COLUMNS), tl.float32)
    first = share.to(tl.int64) * rows_each
    for start in range(0, rows_each, ROWS):
        at_M = first + start + tl.arange(0, ROWS)
        is_row = at_M < num_rows
        left = tl.load(
            left_ptr + at_M[:, None] * left_stride + at_R[None, :],
            mask=is_row[:, None] & is_rank[None, :],
            other=0.0,
        )
        right = tl.load(
            right_ptr + at_M[:, None] * right_stride + at_K[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        sums = tl.dot(tl.trans(left), right, sums, input_precision=PRECISION)
    at = (share * RANK + at_R)[:, None] * num_columns + at_K[None, :]
    tl.store(sums_ptr + at, sums, mask=is_rank[:, None] & is_column[None, :])


def thin_product(left_MR: Tensor, right_MK: Tensor) -> Tensor:
    """Return left^T @ right in fp32, [R, K]. Rows may lie apart, their entries not."""
    (num_rows, rank), num_columns = left_MR.shape, right_MK.shape[1]
    tiles = triton.cdiv(num_columns, _COLUMNS)
    shares = max(1, min(_PROGRAMS // tiles, triton.cdiv(num_rows, 2 * _ROWS)))
    rows_each = triton.cdiv(triton.cdiv(num_rows, shares), _ROWS) * _ROWS
    sums_SRK = right_MK.new_empty(shares, rank, num_columns, dtype=torch.float32)
    if launches(right_MK):
        _thin[(tiles, shares)](
            left_MR,
            right_MK,
            sums_SRK,
            num_rows,
            num_columns,
            left_MR.stride(0),
            right_MK.stride(0),
            rows_each,
            RANK=rank,
            PADDED_RANK=max(triton.next_power_of_2(rank), 16),
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            PRECISION="ieee" if right_MK.dtype == torch.float32 else "tf32",
            num_stages=4,
        )
    return sums_SRK.sum(0)
