"""Quantised matrices and their products: by tensor cores, or emulated.

    tensor cores   FP8 copies made by kernels, multiplied by cuBLAS with their scales
    emulation      the same FP8 numbers, dequantised to fp32 and multiplied there: for correctness

A product is a @ b.T of two operands that both have the summed axis last. FP8 numbers and scales
have the same bits in both; products agree up to the rounding of their sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from homeostat.precision.fp8 import dequantise, quantise
from homeostat.precision.recipe import Fp8Recipe


@dataclass(frozen=True, slots=True)
class Operand:
    """A quantised matrix with the summed axis last; dequantised, without scales, if emulated."""

    values: Tensor
    scales: Tensor | None = None
    # Its scales are those of 128 x 128 blocks.
    is_square: bool = False

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what autograd is to keep of it."""
        return (self.values,) if self.scales is None else (self.values, self.scales)


Pair = tuple[Operand | None, Operand | None]


@dataclass(frozen=True, slots=True)
class Amax:
    """The facts of delayed scaling about a tensor: its expected largest number, and a record.

    `expected` is None before the first update; `record` is None if nothing is to be recorded.
    """

    expected: Tensor | None = None
    record: Tensor | None = None


NO_AMAX = Amax()


class Arithmetic(Protocol):
    """Makes operands and multiplies them."""

    def operands(
        self,
        x_RC: Tensor,
        recipe: Fp8Recipe,
        dtype: torch.dtype,
        *,
        is_weight: bool = False,
        rows: bool = True,
        columns: bool = True,
        amax: Amax = NO_AMAX,
        into: Pair = (None, None),
    ) -> Pair:
        """Return the matrix quantised by rows, and its transpose quantised by rows.

        `into` holds operands of an earlier call, whose memory is written again.
        """
        ...

    def product(
        self, a: Operand, b: Operand, recipe: Fp8Recipe, *, sizes: tuple[int, int], fast: bool
    ) -> Tensor:
        """Return a @ b.T without padding, its rows one after the other: kernels that follow read
        them so. `fast` allows sums of lower precision."""
        ...


class Emulation:
    """The arithmetic of a CPU, for correctness only."""

    def operands(
        self,
        x_RC: Tensor,
        recipe: Fp8Recipe,
        dtype: torch.dtype,
        *,
        is_weight: bool = False,
        rows: bool = True,
        columns: bool = True,
        amax: Amax = NO_AMAX,
        into: Pair = (None, None),
    ) -> Pair:
        if amax.record is not None:
            largest = x_RC.detach().abs().amax().float()
            torch.maximum(amax.record, largest, out=amax.record)
        how = {"dtype": dtype, "power_of_two": recipe.power_of_two, "amax": amax.expected}
        block = recipe.weights if is_weight else recipe.rows
        # Blocks of the transpose are blocks of the matrix, turned; squares are their own.
        turned = block[::-1]
        is_shared = rows and turned == block
        by_rows = dequantise(quantise(x_RC, block=block, **how)) if rows else None
        by_columns = by_rows if is_shared else None
        if columns and by_columns is None:
            by_columns = dequantise(quantise(x_RC, block=turned, **how))
        return (
            None if by_rows is None else Operand(by_rows),
            Operand(by_columns.t()) if columns and by_columns is not None else None,
        )

    def product(
        self, a: Operand, b: Operand, recipe: Fp8Recipe, *, sizes: tuple[int, int], fast: bool
    ) -> Tensor:
        return a.values @ b.values.t()


class TensorCores:
    """The arithmetic of a GPU with FP8 units."""

    def operands(
        self,
        x_RC: Tensor,
        recipe: Fp8Recipe,
        dtype: torch.dtype,
        *,
        is_weight: bool = False,
        rows: bool = True,
        columns: bool = True,
        amax: Amax = NO_AMAX,
        into: Pair = (None, None),
    ) -> Pair:
        from homeostat.ops.kernels.fp8 import Copy, quantised_copies

        before = tuple(
            None if one is None or one.scales is None else Copy(one.values, one.scales)
            for one in into
        )
        found = quantised_copies(
            x_RC.detach(),
            scope=_scope(recipe, is_weight=is_weight),
            dtype=dtype,
            power_of_two=recipe.power_of_two,
            multiple=recipe.multiple,
            rows=rows,
            columns=columns,
            amax=amax.expected,
            record=amax.record,
            into=(before[0], before[1]),
        )
        square = is_weight and recipe.scaling == "blockwise"
        made = [None if one is None else Operand(one.values, one.scales, square) for one in found]
        return made[0], made[1]

    def product(
        self, a: Operand, b: Operand, recipe: Fp8Recipe, *, sizes: tuple[int, int], fast: bool
    ) -> Tensor:
        assert a.scales is not None, "an operand of tensor cores has scales"
        assert b.scales is not None, "an operand of tensor cores has scales"
        num_rows, num_columns = sizes
        out = (_blockwise if recipe.scaling == "blockwise" else _plain)(a, b, fast)
        return out[:num_rows, :num_columns].contiguous()


def arithmetic_of(device: torch.device) -> Arithmetic:
    """Return how FP8 is computed on a device."""
    return TensorCores() if device.type == "cuda" else Emulation()


def _scope(recipe: Fp8Recipe, *, is_weight: bool) -> Literal["block", "square", "row", "tensor"]:
    if recipe.scaling == "blockwise":
        return "square" if is_weight else "block"
    return "row" if recipe.scaling == "rowwise" else "tensor"


def _plain(a: Operand, b: Operand, fast: bool) -> Tensor:
    assert a.scales is not None
    assert b.scales is not None
    return torch._scaled_mm(
        a.values,
        b.values.t(),
        a.scales,
        b.scales.t() if b.scales.ndim == 2 else b.scales,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def _blockwise(a: Operand, b: Operand, fast: bool) -> Tensor:
    """Scales are stored as cuBLAS reads them; it has no fast sums for blocks."""
    assert a.scales is not None
    assert b.scales is not None
    kinds = functional.ScalingType
    return functional.scaled_mm(
        a.values,
        b.values.t(),
        a.scales.t(),
        kinds.BlockWise1x128,
        b.scales.t(),
        kinds.BlockWise128x128 if b.is_square else kinds.BlockWise1x128,
        output_dtype=torch.bfloat16,
    )
