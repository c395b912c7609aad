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

from homeostat.ops.kernels import launches, num_programs

Scope = Literal["block", "square", "row", "tensor"]
_SIDE = 128
# Warps of a program by scope, measured on an H200.
_WARPS: dict[Scope, int] = {"block": 4, "square": 8, "row": 8, "tensor": 8}
# Numbers that a program of the search for the largest one looks at in one go.
_RUN = 8192
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
    largest = _given(amax) if amax is not None else _largest(x_RC, scope, rows, columns)
    # A square's copies are made one by one: Triton 3.6 mixes them up if one program makes both.
    passes = [(rows, columns)] if scope != "square" else [(rows, False), (False, columns)]
    for has_rows, has_columns in passes:
        outs = [
            tensor
            for copy in (by_rows, by_columns)
            for tensor in ((x_RC, x_RC) if copy is None else (copy.values, copy.scales))
        ]
        _quantise[_grid(sizes)](
            x_RC, *outs, *largest, x_RC if record is None else record.view(torch.int32),
            *x_RC.shape, x_RC.stride(0), *sizes,
            LIMIT=torch.finfo(dtype).max, SCOPE=_SCOPES[scope], POWER_OF_TWO=power_of_two,
            HAS_ROWS=has_rows, HAS_COLUMNS=has_columns, RECORDS=record is not None,
            IS_GIVEN=amax is not None, SIDE=_SIDE, num_warps=_WARPS[scope],
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


def _given(amax: Tensor) -> tuple[Tensor, Tensor]:
    bits = amax.reshape(1).float().view(torch.int32)
    return bits, bits


def _largest(x_RC: Tensor, scope: Scope, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Return the bits of the largest numbers, for the copy by rows and for the one by columns.

    A block of 1 x 128 is within a tile, and needs no search before.
    """
    grid, place = _grid(x_RC.shape), {"dtype": torch.int32, "device": x_RC.device}
    if scope == "block":
        return x_RC, x_RC
    if scope == "tensor":
        found, flat = torch.zeros(1, **place), x_RC.contiguous()
        num_runs = triton.cdiv(flat.numel(), _RUN)
        programs = min(num_runs, num_programs(x_RC.device))
        _find_whole[(programs,)](flat, found, flat.numel(), RUN=_RUN, num_warps=8)
        return found, found
    is_square = scope == "square"
    counts = (grid[0] * grid[1], 1) if is_square else x_RC.shape
    by_rows, by_columns = (torch.zeros(count, **place) for count in counts)
    _find_largest[grid](
        x_RC, by_rows, by_columns, *x_RC.shape, x_RC.stride(0),
        IS_SQUARE=is_square, HAS_ROWS=rows, HAS_COLUMNS=columns, SIDE=_SIDE, num_warps=8,
    )  # fmt: skip
    return by_rows, by_rows if is_square else by_columns


def _grid(sizes: tuple[int, ...]) -> tuple[int, int]:
    return triton.cdiv(sizes[0], _SIDE), triton.cdiv(sizes[1], _SIDE)


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
def _rounded(x, inverse, LIMIT: tl.constexpr, IS_GIVEN: tl.constexpr, dtype: tl.constexpr):
    """Round to FP8. The cast saturates and keeps NaN: the inverse of a block that is not finite."""
    scaled = x * inverse
    if IS_GIVEN:
        # A scale that was given says nothing about infinite numbers, which the cast would hide.
        clamped = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
        scaled = tl.where(tl.abs(scaled) < float("inf"), clamped, float("nan"))
    return scaled.to(dtype)


@triton.jit
def _find_whole(x_ptr, found_ptr, num_numbers, RUN: tl.constexpr):
    """Raise `found` to the bits of the largest of all numbers; a program takes every n-th run."""
    at, step = tl.arange(0, RUN), tl.num_programs(0) * RUN
    largest = tl.zeros((RUN,), tl.int32)
    for first in range(tl.program_id(0) * RUN, num_numbers, step):
        x = tl.load(x_ptr + first + at, mask=first + at < num_numbers, other=0.0)
        largest = tl.maximum(largest, _bits(x.to(tl.float32)))
    tl.atomic_max(found_ptr, tl.max(largest, axis=0))


@triton.jit
def _find_largest(
    x_ptr, row_ptr, column_ptr, num_rows, num_columns, stride,
    IS_SQUARE: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    down, across = tl.program_id(0), tl.program_id(1)
    row = down * SIDE + tl.arange(0, SIDE)
    column = across * SIDE + tl.arange(0, SIDE)
    bits = _bits(_load(x_ptr, row, column, num_rows, num_columns, stride))
    if IS_SQUARE:
        at = down * tl.num_programs(1) + across
        tl.store(row_ptr + at, tl.max(tl.max(bits, axis=1), axis=0))
    else:
        if HAS_ROWS:
            tl.atomic_max(row_ptr + row, tl.max(bits, axis=1), mask=row < num_rows)
        if HAS_COLUMNS:
            tl.atomic_max(column_ptr + column, tl.max(bits, axis=0), mask=column < num_columns)


@triton.jit
def _amax(bits, amax_ptr, at, is_inside, AXIS: tl.constexpr, SCOPE: tl.constexpr):
    """Return the bits of the largest number that each number of a tile shares its scale with."""
    if SCOPE == 0:
        found = tl.max(bits, axis=AXIS, keep_dims=True)
    elif SCOPE == 1:
        square = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        found = tl.load(amax_ptr + square + tl.zeros((1, 1), tl.int32))
    elif SCOPE == 2:
        found = tl.load(amax_ptr + at, mask=is_inside, other=0)
    else:
        found = tl.load(amax_ptr + tl.zeros((1, 1), tl.int32))
    return found


@triton.jit
def _store_scales(
    scales_ptr, scale, at, is_padded, here, across, num_rows, num_columns,
    SCOPE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Store the scales of a copy's tile, which is the `here`-th down and the `across`-th across."""
    first = tl.zeros((1, 1), tl.int32)
    if SCOPE == 0:
        tl.store(scales_ptr + across * num_rows + at, scale, mask=is_padded)
    elif SCOPE == 1:
        wide = tl.cdiv(tl.cdiv(num_columns, SIDE), 4) * 4
        tl.store(scales_ptr + here * wide + across + first, scale)
    elif across == 0:
        if SCOPE == 2:
            tl.store(scales_ptr + at, scale, mask=is_padded)
        elif here == 0:
            tl.store(scales_ptr + first, scale)


@triton.jit
def _quantise(
    x_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, row_amax_ptr, column_amax_ptr,
    record_ptr, num_rows, num_columns, stride, padded_rows, padded_columns,
    LIMIT: tl.constexpr, SCOPE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr, RECORDS: tl.constexpr,
    IS_GIVEN: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    down, across = tl.program_id(0), tl.program_id(1)
    row = down * SIDE + tl.arange(0, SIDE)
    column = across * SIDE + tl.arange(0, SIDE)
    x = _load(x_ptr, row, column, num_rows, num_columns, stride)
    bits = _bits(x)
    if RECORDS:
        tl.atomic_max(record_ptr, tl.max(tl.max(bits, axis=1), axis=0))
    if HAS_ROWS:
        at = row[:, None]
        amax = _amax(bits, row_amax_ptr, at, at < num_rows, 1, SCOPE)
        scale, inverse = _scales(amax, LIMIT, POWER_OF_TWO)
        values = _rounded(x, inverse, LIMIT, IS_GIVEN, rows_ptr.dtype.element_ty)
        at_values = rows_ptr + at.to(tl.int64) * padded_columns + column[None, :]
        tl.store(at_values, values, mask=(at < padded_rows) & (column[None, :] < padded_columns))
        _store_scales(
            row_scales_ptr, scale, at, at < padded_rows, down, across, padded_rows,
            padded_columns, SCOPE, SIDE,
        )  # fmt: skip
    if HAS_COLUMNS:
        at = column[None, :]
        amax = _amax(bits, column_amax_ptr, at, at < num_columns, 0, SCOPE)
        scale, inverse = _scales(amax, LIMIT, POWER_OF_TWO)
        values = _rounded(x, inverse, LIMIT, IS_GIVEN, columns_ptr.dtype.element_ty)
        at_values = columns_ptr + column[:, None].to(tl.int64) * padded_rows + row[None, :]
        turned = (column[:, None] < padded_columns) & (row[None, :] < padded_rows)
        tl.store(at_values, tl.trans(values), mask=turned)
        _store_scales(
            column_scales_ptr, scale, at, at < padded_columns, across, down, padded_columns,
            padded_rows, SCOPE, SIDE,
        )  # fmt: skip
