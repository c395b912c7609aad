"""Adapters in the products of a decoding step, unmerged and without a launch of their own.

    y = W x + scale * B (A x)

The rows of A lie before those of W in memory (models/side_by_side.py), so that one product computes
both. Its first programs leave A x (`low`); the others have summed up W x by then, wait until `low`
is there, and add B's part. Programs start in the order of their number, so that those that are
waited for never wait for room.

Every product has its own `low`. Nothing but its numbers says that they are there: before, they are
`EMPTY`, bits that no result has. A product empties the `low` of the next one; no earlier product
uses that any more, because each waits for the end of the one before it.

Maps of one input (q, k and v; gate and up) share a product: A's rows of all of them, one map after
the other, are filled up with zeros to whole tiles; B's are one matrix of all outputs.

Suffixes: `_B` rows, `_O` outputs, `_K` inputs, `_R` rank, `_P` rows of A and W, padding included,
`_W` the widest padded rows of A.
"""

# Triton compiles its kernels from source: pyright misreads their calls.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.models.side_by_side import ADAPTER_ROWS, AdaptedMaps

# The bits of a number that is not there yet: those of a NaN that no operation gives.
EMPTY = -1
_EMPTY = tl.constexpr(EMPTY)


@triton.jit
def empty_next(
    next_ptr,
    place,
    at_B,
    is_row,
    AHEAD: tl.constexpr,
    LOW_WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Empty these rows of the next product's `low`, if this program is A's first."""
    if AHEAD > 0:
        if place == 0:
            for first in tl.static_range(0, LOW_WIDTH, OUTPUTS):
                at = at_B[:, None] * LOW_WIDTH + first + tl.arange(0, OUTPUTS)[None, :]
                tl.store(next_ptr + at, tl.full(at.shape, _EMPTY, tl.int32), mask=is_row[:, None])


@triton.jit
def leave_low(low_BO, low_ptr, place, at_B, is_row, LOW_WIDTH: tl.constexpr, OUTPUTS: tl.constexpr):
    """Store a tile of A x."""
    at = at_B[:, None] * LOW_WIDTH + place + tl.arange(0, OUTPUTS)[None, :]
    bits = low_BO.to(tl.float32).to(tl.int32, bitcast=True)
    tl.store(low_ptr + at, bits, mask=is_row[:, None])


@triton.jit
def rows_of_b(b_ptr, at_O, is_output, RANK: tl.constexpr, PADDED_RANK: tl.constexpr):
    """[outputs, rank]; rows that are no outputs, and columns past the rank, are zero."""
    at_R = tl.arange(0, PADDED_RANK)
    is_in = is_output[:, None] & (at_R < RANK)[None, :]
    return tl.load(b_ptr + at_O[:, None] * RANK + at_R[None, :], mask=is_in, other=0.0)


@triton.jit
def low_of(
    low_ptr, number, at_B, is_row, LOW_WIDTH: tl.constexpr, RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
):  # fmt: skip
    """[rank, rows] in fp32: A x of map `number`, as soon as all of it is there."""
    at_R = tl.arange(0, PADDED_RANK)
    is_in = (at_R < RANK)[:, None] & is_row[None, :]
    at = at_B[None, :] * LOW_WIDTH + number * RANK + at_R[:, None]
    bits = tl.load(low_ptr + at, mask=is_in, other=0, volatile=True)
    while tl.min(tl.min((bits != _EMPTY).to(tl.int32), 1), 0) == 0:
        bits = tl.load(low_ptr + at, mask=is_in, other=0, volatile=True)
    return bits.to(tl.float32, bitcast=True)


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapters of maps that share a product, and where their parts meet in a step.

    `starts` are the first outputs of the second and third map; where there is none, the end.
    """

    maps: AdaptedMaps
    low_BW: Tensor
    next_BW: Tensor
    starts: tuple[int, int]

    @property
    def ahead(self) -> int:
        return self.maps.ahead

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.maps.b_OR, self.low_BW, self.next_BW

    def options(self) -> dict[str, int]:
        rank = self.maps.rank
        padded = max(triton.next_power_of_2(rank), 16)
        width = self.low_BW.shape[1]
        return {"AHEAD": self.ahead, "LOW_WIDTH": width, "RANK": rank, "PADDED_RANK": padded}


# Options of a product without adapters.
NO_ADAPTER = {"AHEAD": 0, "LOW_WIDTH": 0, "RANK": 0, "PADDED_RANK": 16}


@dataclass(frozen=True, slots=True)
class Factors:
    """The matrices of a product, and what its kernel is told of their adapters.

    Without an adapter the weight stands for its tensors, which are not read then.
    """

    weight_PK: Tensor
    adapter: LowRank | None

    @classmethod
    def of(cls, weight_OK: Tensor, adapter: LowRank | None) -> Factors:
        return cls(weight_OK if adapter is None else adapter.maps.whole_PK, adapter)

    @property
    def num_outputs(self) -> int:
        return len(self.weight_PK) - (0 if self.adapter is None else self.adapter.ahead)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.adapter is None:
            return self.weight_PK, self.weight_PK, self.weight_PK
        return self.adapter.tensors()

    @property
    def scale(self) -> float:
        return 0.0 if self.adapter is None else self.adapter.maps.scale

    def options(self) -> dict[str, int]:
        return NO_ADAPTER if self.adapter is None else self.adapter.options()


class LowRankRoom:
    """Memory for the `low` of all products of a step, at least two, in their order."""

    def __init__(
        self, num_products: int, *, max_rows: int, width: int, device: torch.device
    ) -> None:
        # A product empties that of the next one, so that there are at least two.
        assert num_products > 1, "a model has more than one product with adapters"
        shape = (num_products, max_rows, width)
        self._low_PBW = torch.full(shape, EMPTY, dtype=torch.int32, device=device)

    def at(self, number: int, maps: AdaptedMaps) -> LowRank:
        """Return the adapters of product `number` of the step."""
        ends = [sum(maps.sizes[:count]) for count in range(1, len(maps.sizes) + 1)]
        starts = (ends[0], ends[min(1, len(ends) - 1)])
        after = (number + 1) % len(self._low_PBW)
        return LowRank(maps, self._low_PBW[number], self._low_PBW[after], starts)


assert ADAPTER_ROWS % 16 == 0, "A's rows are whole tiles"
