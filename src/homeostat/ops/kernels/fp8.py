"""Quantise a matrix to FP8 in one pass, by rows and by columns.

A linear map needs its inputs twice: by rows for its output, and transposed for the gradient of its
weight, because tensor cores take FP8 operands only with the summed axis last. Both copies are made
from one load of a tile of 128 x 128. If a scale covers more than a tile, a pass before finds the
largest numbers.

Every number is computed by the same fp32 operations, each rounded once, as in precision/fp8.py:
`div_rn` and not `/`, whose result Triton rounds differently.

Copies are padded with zeros to multiples of `multiple`. Scales of 1 x 128 are stored by blocks
first, [C / 128, R], those of 128 x 128 as [R / 128, C / 128] with rows padded to 4: as cuBLAS reads
them.

Suffixes: `_R` rows, `_C` columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import launches

Scope = Literal["block", "square", "row", "tensor"]
_SIDE = 128
# fp32 bits of 2 ** -100, as precision/fp8.py's SMALLEST.
_SMALLEST_BITS = tl.constexpr(27 << 23)
_SCOPES: dict[Scope, int] = {"block": 0, "square": 1, "row": 2, "tensor": 3}


@dataclass(frozen=True, slots=True)
class Copy:
    """A padded FP8 matrix with the summed axis last, and its scales as products read them."""

    values: Tensor
    scales: Tensor


def quantised_copies(
    x_RC: Tensor,
    *,
    scope: Scope,
    dtype: torch.dtype,
    power_of_two: bool,
    multiple: int,
    rows: bool = True,
    columns: bool = True,
    amax: Tensor | None = None,
    record: Tensor | None = None,
    into: tuple[Copy | None, Copy | None] = (None, None),
) -> tuple[Copy | None, Copy | None]:
    """Return the copy by rows [R, C] and the one by columns [C, R].

    `amax` ([1], scope "tensor"): the largest number to be expected; without it, that of `x_RC`.
    `record` ([1], fp32) is raised to the largest number. `into`: copies that are written again.
    """
    x_RC = x_RC if x_RC.stride(-1) == 1 else x_RC.contiguous()
    sizes = tuple(_up(size, multiple) for size in x_RC.shape)
    by_rows, by_columns = into
    if rows and by_rows is None:
        by_rows = _empty(x_RC, sizes, scope, dtype)
    if columns and by_columns is None:
        by_columns = _empty(x_RC, sizes[::-1], scope, dtype)
    if not launches(x_RC):
        return by_rows, by_columns
    grid = (triton.cdiv(sizes[0], _SIDE), triton.cdiv(sizes[1], _SIDE))
    row_amax = column_amax = None
    if scope in ("row", "tensor"):
        row_amax, column_amax = _largest(x_RC, grid, scope, rows, columns, amax)
    outs = [
        tensor
        for copy in (by_rows, by_columns)
        for tensor in ((x_RC, x_RC) if copy is None else (copy.values, copy.scales))
    ]
    _quantise[grid](
        x_RC, *outs,
        x_RC if row_amax is None else row_amax, x_RC if column_amax is None else column_amax,
        x_RC if record is None else record.view(torch.int32), *x_RC.shape, x_RC.stride(0), *sizes,
        LIMIT=torch.finfo(dtype).max, SCOPE=_SCOPES[scope], POWER_OF_TWO=power_of_two,
        HAS_ROWS=rows, HAS_COLUMNS=columns, RECORDS=record is not None, SIDE=_SIDE, num_warps=8,
    )  # fmt: skip
    return by_rows, by_columns


def _empty(x: Tensor, sizes: tuple[int, ...], scope: Scope, dtype: torch.dtype) -> Copy:
    num_rows, num_columns = sizes
    tiles = triton.cdiv(num_rows, _SIDE), triton.cdiv(num_columns, _SIDE)
    shapes: dict[Scope, tuple[int, ...]] = {
        "block": (tiles[1], num_rows),
        "square": (tiles[0], _up(tiles[1], 4)),
        "row": (num_rows, 1),
        "tensor": (1,),
    }
    values = torch.empty(sizes, dtype=dtype, device=x.device)
    # Blocks that only fill up a row are read, and must be finite.
    make = torch.zeros if scope == "square" else torch.empty
    return Copy(values, make(shapes[scope], dtype=torch.float32, device=x.device))


def _largest(
    x_RC: Tensor,
    grid: tuple[int, int],
    scope: Scope,
    rows: bool,
    columns: bool,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the bits of the largest numbers of rows and of columns, or of the whole tensor."""
    if amax is not None:
        bits = amax.reshape(1).float().view(torch.int32)
        return bits, bits
    whole = scope == "tensor"
    counts = (1, 1) if whole else x_RC.shape
    found = [torch.zeros(count, dtype=torch.int32, device=x_RC.device) for count in counts]
    _find_largest[grid](
        x_RC, *found, *x_RC.shape, x_RC.stride(0),
        IS_WHOLE=whole, HAS_ROWS=rows, HAS_COLUMNS=columns, SIDE=_SIDE, num_warps=8,
    )  # fmt: skip
    return found[0], found[0] if whole else found[1]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@triton.jit
def _load(x_ptr, row, column, num_rows, num_columns, stride):
    at = x_ptr + row[:, None].to(tl.int64) * stride + column[None, :]
    inside = (row[:, None] < num_rows) & (column[None, :] < num_columns)
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _bits(x):
    """Bits of |x|: as integers they are ordered like the numbers, and NaN is above all."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _scales(bits, LIMIT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Return scales by the bits of the largest numbers, and what they are multiplied by."""
    largest = tl.maximum(bits, _SMALLEST_BITS).to(tl.float32, bitcast=True)
    limit = tl.full(largest.shape, LIMIT, tl.float32)
    scale = tl.math.div_rn(largest, limit)
    inverse = tl.math.div_rn(limit, largest)
    if POWER_OF_TWO:
        power = (scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
        scale = power.to(tl.float32, bitcast=True)
        inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
    is_finite = largest < float("inf")
    scale = tl.where(is_finite, scale, float("nan"))
    return scale, tl.where(is_finite, inverse, float("nan"))


@triton.jit
def _rounded(x, inverse, LIMIT: tl.constexpr, dtype: tl.constexpr):
    scaled = x * inverse
    clamped = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
    return tl.where(tl.abs(scaled) < float("inf"), clamped, float("nan")).to(dtype)


@triton.jit
def _find_largest(
    x_ptr, row_ptr, column_ptr, num_rows, num_columns, stride,
    IS_WHOLE: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    bits = _bits(_load(x_ptr, row, column, num_rows, num_columns, stride))
    if IS_WHOLE:
        tl.atomic_max(row_ptr, tl.max(tl.max(bits, axis=1), axis=0))
    else:
        if HAS_ROWS:
            tl.atomic_max(row_ptr + row, tl.max(bits, axis=1), mask=row < num_rows)
        if HAS_COLUMNS:
            tl.atomic_max(column_ptr + column, tl.max(bits, axis=0), mask=column < num_columns)


@triton.jit
def _quantise(
    x_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, row_amax_ptr, column_amax_ptr,
    record_ptr, num_rows, num_columns, stride, padded_rows, padded_columns,
    LIMIT: tl.constexpr, SCOPE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr, RECORDS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    at_row, at_column = tl.program_id(0), tl.program_id(1)
    row = at_row * SIDE + tl.arange(0, SIDE)
    column = at_column * SIDE + tl.arange(0, SIDE)
    x = _load(x_ptr, row, column, num_rows, num_columns, stride)
    bits = _bits(x)
    inside = (row[:, None] < padded_rows) & (column[None, :] < padded_columns)
    if RECORDS:
        tl.atomic_max(record_ptr, tl.max(tl.max(bits, axis=1), axis=0))
    if SCOPE == 1:
        both = tl.max(tl.max(bits, axis=1, keep_dims=True), axis=0, keep_dims=True)
    elif SCOPE == 3:
        both = tl.load(row_amax_ptr + tl.zeros((1, 1), tl.int32))
    if HAS_ROWS:
        if SCOPE == 0:
            amax = tl.max(bits, axis=1, keep_dims=True)
        elif SCOPE == 2:
            amax = tl.load(row_amax_ptr + row[:, None], mask=row[:, None] < num_rows, other=0)
        else:
            amax = both
        scale, inverse = _scales(amax, LIMIT, POWER_OF_TWO)
        values = _rounded(x, inverse, LIMIT, rows_ptr.dtype.element_ty)
        at = rows_ptr + row[:, None].to(tl.int64) * padded_columns + column[None, :]
        tl.store(at, values, mask=inside)
        if SCOPE == 0:
            at_scale = row_scales_ptr + at_column * padded_rows + row[:, None]
            tl.store(at_scale, scale, mask=row[:, None] < padded_rows)
        elif SCOPE == 1:
            wide = tl.cdiv(tl.cdiv(padded_columns, SIDE), 4) * 4
            tl.store(row_scales_ptr + at_row * wide + at_column + tl.zeros((1, 1), tl.int32), scale)
        elif at_column == 0:
            if SCOPE == 2:
                tl.store(row_scales_ptr + row[:, None], scale, mask=row[:, None] < padded_rows)
            elif at_row == 0:
                tl.store(row_scales_ptr + tl.zeros((1, 1), tl.int32), scale)
    if HAS_COLUMNS:
        if SCOPE == 0:
            amax = tl.max(bits, axis=0, keep_dims=True)
        elif SCOPE == 2:
            is_column = column[None, :] < num_columns
            amax = tl.load(column_amax_ptr + column[None, :], mask=is_column, other=0)
        else:
            amax = both
        scale, inverse = _scales(amax, LIMIT, POWER_OF_TWO)
        values = _rounded(x, inverse, LIMIT, columns_ptr.dtype.element_ty)
        at = columns_ptr + column[:, None].to(tl.int64) * padded_rows + row[None, :]
        turned = (column[:, None] < padded_columns) & (row[None, :] < padded_rows)
        tl.store(at, tl.trans(values), mask=turned)
        if SCOPE == 0:
            at_scale = column_scales_ptr + at_row * padded_columns + column[None, :]
            tl.store(at_scale, scale, mask=column[None, :] < padded_columns)
        elif SCOPE == 1:
            wide = tl.cdiv(tl.cdiv(padded_rows, SIDE), 4) * 4
            at_scale = column_scales_ptr + at_column * wide + at_row
            tl.store(at_scale + tl.zeros((1, 1), tl.int32), scale)
        elif at_row == 0:
            if SCOPE == 2:
                at_scale = column_scales_ptr + column[None, :]
                tl.store(at_scale, scale, mask=column[None, :] < padded_columns)
            elif at_column == 0:
                tl.store(column_scales_ptr + tl.zeros((1, 1), tl.int32), scale)
