"""Adapters in the products of a decoding step, unmerged and without another launch.

    y = W x + scale * B (A x)

The rows of A lie before those of W in memory (models/side_by_side.py), so that one product computes
both. Its first programs store A x (`low`). The others compute W x meanwhile, wait until `low` is
complete, and add B's part. Programs start in the order of their numbers, so a program that others
wait for is always running. For many rows several programs share the inputs of A x, so that it is
ready before the sums of W x are: each stores a part, and B is multiplied by all parts.

There is no flag that says that `low` is ready. Its memory is filled with `EMPTY` before, bits that
no result has, and a number is ready as soon as it has other bits. A few buffers serve all products
in turn. A product fills the buffer of the next product with `EMPTY`. No earlier product still reads
that buffer, because each waits for its predecessor to end.

Maps that have the same input (q, k and v; gate and up) share a product. The rows of their A
matrices follow each other and are padded with zeros to whole tiles; their B matrices form one
matrix with all outputs.

Suffixes: `_B` rows, `_O` outputs, `_K` inputs, `_R` rank, `_P` rows of A and W, padding included,
`_W` the widest padded rows of A, `_Q` columns of all parts, `_N` parts, `_S` buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.models.side_by_side import ADAPTER_ROWS, AdaptedMaps

# The bits of a number that is not ready: a NaN that no operation produces.
EMPTY = -1
_EMPTY = tl.constexpr(EMPTY)
# The largest number of programs that share the inputs of A x.
MAX_PARTS = 4
_MAX_PARTS = tl.constexpr(MAX_PARTS)


@triton.jit
def leave_part(
    x_desc, weight_desc, rstd_B, low_ptr, next_ptr, num_inputs, row, place, part, at_B, is_row,
    LOW_WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr, element: tl.constexpr,
):  # fmt: skip
    """Store a tile of A x for one part of the inputs, and empty the next product's buffer."""
    per_part = tl.cdiv(tl.cdiv(num_inputs, INPUTS), PARTS) * INPUTS
    first = part * per_part
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(first, tl.minimum(first + per_part, num_inputs), INPUTS):
        weight, x = weight_desc.load([place, start]), x_desc.load([row, start])
        sums = tl.dot(weight, tl.trans(x), sums, input_precision=PRECISION)
    low = tl.trans(sums * rstd_B[None, :]).to(element)
    at = at_B[:, None] * LOW_WIDTH + place + tl.arange(0, OUTPUTS)[None, :]
    bits = low.to(low_ptr.dtype.element_ty, bitcast=True)
    tl.store(low_ptr + part * PART + at, bits, mask=is_row[:, None])
    if place == 0:
        empty_rows(next_ptr, part, at_B, is_row, LOW_WIDTH, PART, PARTS, OUTPUTS)


@triton.jit
def empty_rows(next_ptr, part, at_B, is_row, LOW_WIDTH: tl.constexpr, PART: tl.constexpr,
               PARTS: tl.constexpr, OUTPUTS: tl.constexpr):  # fmt: skip
    """Empty rows of one part of the next product's `low`, and of parts that this product lacks."""
    for other in tl.static_range(0, _MAX_PARTS, PARTS):
        if part + other < _MAX_PARTS:
            for first in tl.static_range(0, LOW_WIDTH, OUTPUTS):
                at = at_B[:, None] * LOW_WIDTH + first + tl.arange(0, OUTPUTS)[None, :]
                empty = tl.full(at.shape, _EMPTY, next_ptr.dtype.element_ty)
                tl.store(next_ptr + (part + other) * PART + at, empty, mask=is_row[:, None])


@triton.jit
def rows_of_b(
    b_ptr, at_O, is_output, first, RANK: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    """Load B from column `first` on, [outputs, columns of all parts].

    Its columns are repeated for each part of A x. Everything beyond the outputs and the rank is 0.
    """
    at_R = tl.arange(0, PADDED_PARTS * COLUMNS) % COLUMNS - first
    is_in = is_output[:, None] & ((at_R >= 0) & (at_R < RANK))[None, :]
    return tl.load(b_ptr + at_O[:, None] * RANK + at_R[None, :], mask=is_in, other=0.0)


@triton.jit
def low_of(
    low_ptr, first, at_B, is_row, COUNT: tl.constexpr, COLUMNS: tl.constexpr,
    LOW_WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr,
    element: tl.constexpr,
):  # fmt: skip
    """Wait for `COUNT` numbers of A x from `first` on; return them, [columns of all parts, rows].

    They are padded with zeros to `COLUMNS` for each part.
    """
    at_Q = tl.arange(0, PADDED_PARTS * COLUMNS)
    column, part = at_Q % COLUMNS, at_Q // COLUMNS
    is_in = ((column < COUNT) & (part < PARTS))[:, None] & is_row[None, :]
    at = at_B[None, :] * LOW_WIDTH + (part * PART + first + column)[:, None]
    bits = tl.load(low_ptr + at, mask=is_in, other=0, volatile=True)
    while tl.min((bits != _EMPTY).to(tl.int32)) == 0:
        bits = tl.load(low_ptr + at, mask=is_in, other=0, volatile=True)
    return bits.to(element, bitcast=True)


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapters of maps that share a product, with the buffers of this product and the next.

    `starts` are the first outputs of the second and third map, or the end if there is no such map.
    """

    maps: AdaptedMaps
    low_NBW: Tensor
    next_NBW: Tensor
    starts: tuple[int, int]

    @property
    def ahead(self) -> int:
        return self.maps.ahead

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.maps.b_OR, self.low_NBW, self.next_NBW

    def options(self, parts: int, *, num_maps: int) -> dict[str, int]:
        """Return the options of a product.

        A x is computed in so many parts, and a tile may have outputs of so many maps.
        """
        rank, (_, max_rows, width) = self.maps.rank, self.low_NBW.shape
        return {
            "AHEAD": self.ahead,
            "LOW_WIDTH": width,
            "RANK": rank,
            "COLUMNS": max(triton.next_power_of_2(num_maps * rank), 16),
            "PART": max_rows * width,
            "PARTS": parts,
            "PADDED_PARTS": triton.next_power_of_2(parts),
        }


# Options of a product without adapters.
NO_ADAPTER = {
    "AHEAD": 0,
    "LOW_WIDTH": 0,
    "RANK": 0,
    "COLUMNS": 16,
    "PART": 0,
    "PARTS": 1,
    "PADDED_PARTS": 1,
}


@dataclass(frozen=True, slots=True)
class Factors:
    """The matrices of a product, and the arguments of its kernel for their adapters.

    Without an adapter the weight is passed in place of its tensors, which are then not read.
    """

    weight_PK: Tensor
    adapter: LowRank | None

    @classmethod
    def of(cls, weight_OK: Tensor, adapter: LowRank | None) -> Factors:
        return cls(weight_OK if adapter is None else adapter.maps.whole_PK, adapter)

    @property
    def num_outputs(self) -> int:
        return len(self.weight_PK) - (0 if self.adapter is None else self.adapter.ahead)

    def num_rows(self, parts: int) -> int:
        """Return the number of rows: those of W, and those of A once for each part of A x."""
        return self.num_outputs + (0 if self.adapter is None else parts * self.adapter.ahead)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.adapter is None:
            return self.weight_PK, self.weight_PK, self.weight_PK
        return self.adapter.tensors()

    @property
    def scale(self) -> float:
        return 0.0 if self.adapter is None else self.adapter.maps.scale

    def options(self, parts: int, *, num_maps: int = 1) -> dict[str, int]:
        if self.adapter is None:
            return NO_ADAPTER
        return self.adapter.options(parts, num_maps=num_maps)


class LowRankRoom:
    """The buffers for `low` of all products of a step, of which there are at least two.

    Products use three buffers in turn. The last product has a separate one, so that the first
    buffer is empty when the next step begins.
    """

    def __init__(self, num_products: int, *, max_rows: int, width: int, like: Tensor) -> None:
        # A product empties the buffer of the next one, so there must be at least two.
        assert num_products > 1, "a model has more than one product with adapters"
        self._last = num_products - 1
        shape = (4, MAX_PARTS, max_rows, width)
        # Integers as wide as the model's numbers, to compare their bits.
        dtype = torch.int16 if like.itemsize == 2 else torch.int32
        self._low_SNBW = torch.full(shape, EMPTY, dtype=dtype, device=like.device)

    def at(self, number: int, maps: AdaptedMaps) -> LowRank:
        """Return the adapters of product `number` of the step."""
        ends = [sum(maps.sizes[:count]) for count in range(1, len(maps.sizes) + 1)]
        starts = (ends[0], ends[min(1, len(ends) - 1)])
        after = 0 if number == self._last else self._room(number + 1)
        return LowRank(maps, self._low_SNBW[self._room(number)], self._low_SNBW[after], starts)

    def _room(self, number: int) -> int:
        return 3 if number == self._last else number % 3


assert ADAPTER_ROWS % 16 == 0, "A's rows are whole tiles"
