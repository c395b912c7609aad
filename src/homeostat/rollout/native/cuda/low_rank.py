"""Adapters in the products of a decoding step, unmerged and without a launch of their own.

    y = W x + scale * B (A x)

The rows of A lie before those of W in memory (models/side_by_side.py), so that one product computes
both. Its first programs leave A x (`low`) and raise a flag; the others have summed up W x by then,
wait for the flag, and add B's part. Programs start in the order of their number, so that those that
are waited for never wait for room. Flags are lowered once a step, by its first kernel (rows.enter).

Maps of one input (q, k and v; gate and up) share a product: A's rows of all of them, one map after
the other, are filled up with zeros to whole tiles; B's are one matrix of all outputs.

Suffixes: `_B` rows, `_O` outputs, `_K` inputs, `_R` rank, `_P` rows of A and W, padding included.
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

# Flags of a product: one for each tile of rows.
_FLAGS = 16


@triton.jit
def raise_flag(flag_ptr):
    """Say that this program has stored its part of `low`."""
    tl.debug_barrier()
    tl.atomic_add(flag_ptr, 1)


@triton.jit
def wait_for_flag(flag_ptr, num_raised):
    """Wait until so many programs have raised it. What they stored is read past L1 (".cg")."""
    while tl.atomic_add(flag_ptr, 0) < num_raised:
        pass


@triton.jit
def leave_low(sums, low_ptr, flag_ptr, place, at_B, is_row, AHEAD: tl.constexpr,
              OUTPUTS: tl.constexpr):  # fmt: skip
    """Store a tile of A x, [OUTPUTS, rows], and say so."""
    at_P = place + tl.arange(0, OUTPUTS)
    low = tl.trans(sums).to(low_ptr.dtype.element_ty)
    tl.store(low_ptr + at_B[:, None] * AHEAD + at_P[None, :], low, mask=is_row[:, None])
    raise_flag(flag_ptr)


@triton.jit
def rows_of_b(b_ptr, at_O, is_output, RANK: tl.constexpr, PADDED_RANK: tl.constexpr):
    """[outputs, rank]; rows that are no outputs, and columns past the rank, are zero."""
    at_R = tl.arange(0, PADDED_RANK)
    is_in = is_output[:, None] & (at_R < RANK)[None, :]
    return tl.load(b_ptr + at_O[:, None] * RANK + at_R[None, :], mask=is_in, other=0.0)


@triton.jit
def low_of(low_ptr, number, at_B, is_row, AHEAD: tl.constexpr, RANK: tl.constexpr,
           PADDED_RANK: tl.constexpr):  # fmt: skip
    """[rank, rows]: A x of map `number`."""
    at_R = tl.arange(0, PADDED_RANK)
    is_in = (at_R < RANK)[:, None] & is_row[None, :]
    at = at_B[None, :] * AHEAD + number * RANK + at_R[:, None]
    return tl.load(low_ptr + at, mask=is_in, other=0.0, cache_modifier=".cg")


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapters of maps that share a product, and where their parts meet in a step.

    `starts` are the first outputs of the second and third map; where there is none, the end.
    """

    maps: AdaptedMaps
    low_BP: Tensor
    flags: Tensor
    starts: tuple[int, int]

    @property
    def ahead(self) -> int:
        return self.maps.ahead

    def options(self) -> dict[str, int]:
        rank = self.maps.rank
        padded = max(triton.next_power_of_2(rank), 16)
        return {"AHEAD": self.ahead, "RANK": rank, "PADDED_RANK": padded}


# Options of a product without adapters.
NO_ADAPTER = {"AHEAD": 0, "RANK": 0, "PADDED_RANK": 16}


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
        return self.adapter.maps.b_OR, self.adapter.low_BP, self.adapter.flags

    @property
    def scale(self) -> float:
        return 0.0 if self.adapter is None else self.adapter.maps.scale

    def options(self) -> dict[str, int]:
        return NO_ADAPTER if self.adapter is None else self.adapter.options()


class LowRankRoom:
    """Memory for `low` and the flags of all products of a step."""

    def __init__(self, num_products: int, *, max_rows: int, width: int, like: Tensor) -> None:
        self._low = torch.empty(max_rows * width, dtype=like.dtype, device=like.device)
        self._max_rows = max_rows
        shape = (max(num_products, 1), _FLAGS)
        self.flags = torch.zeros(shape, dtype=torch.int32, device=like.device)

    def at(self, number: int, maps: AdaptedMaps) -> LowRank:
        """Return the adapters of product `number` of the step. Products run one after the other,
        so that all of them use the same room for `low`."""
        low_BP = self._low[: self._max_rows * maps.ahead].view(self._max_rows, maps.ahead)
        ends = [sum(maps.sizes[:count]) for count in range(1, len(maps.sizes) + 1)]
        starts = (ends[0], ends[min(1, len(ends) - 1)])
        return LowRank(maps, low_BP, self.flags[number], starts)


assert ADAPTER_ROWS % 16 == 0, "A's rows are whole tiles"
