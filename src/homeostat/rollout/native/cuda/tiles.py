"""The tiling of products (products.py): how many rows, outputs and inputs a program has.

Suffixes: `_B` rows, `_O` outputs, `_K` inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from homeostat.rollout.native.cuda.early import can_start_early, early

# Beyond, a library's products are better.
MAX_ROWS = 256
# Outputs of a tile, which is what a tensor core takes.
OUTPUTS = 64
# Tiles that are enough to keep the device busy, of short sums and of long ones; tiles that it can
# hold at once.
_BUSY, _BUSY_LONG, _FULL = 64, 48, 264
# Programs, where tiles are shared out.
_SHARED = 128
_MAX_TILE_ROWS = 128
# Bytes of a row's inputs that are multiplied at a time.
_INPUT_BYTES = 256
# Shared memory of a program for tiles in flight.
_STAGE_BYTES = 200_000


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiling of a product.

    `inputs` are multiplied at a time; `shares` parts of the inputs are computed in parallel.
    """

    rows: int
    inputs: int
    stages: int
    shares: int = 1

    def descriptors(self, x_BK: Tensor, weight_OK: Tensor) -> tuple[TensorDescriptor, ...]:
        return (
            TensorDescriptor.from_tensor(x_BK, [self.rows, self.inputs]),
            TensorDescriptor.from_tensor(weight_OK, [OUTPUTS, self.inputs]),
        )

    def grid(self, num_rows: int, num_outputs: int) -> tuple[int, int, int]:
        return triton.cdiv(num_rows, self.rows), triton.cdiv(num_outputs, OUTPUTS), self.shares

    @property
    def parts(self) -> int:
        """Programs that share the inputs of an adapter's A x. Of many rows, reading what they left
        takes longer than they save."""
        wanted = 2 if self.rows <= 32 else 1
        return max(wanted // self.shares, 1) * self.shares

    def options(self, x_BK: Tensor) -> dict[str, Any]:
        return {
            "OUTPUTS": OUTPUTS,
            "ROWS": self.rows,
            "INPUTS": self.inputs,
            "PRECISION": "ieee" if x_BK.dtype == torch.float32 else "tf32",
            "num_stages": self.stages,
            **early(x_BK.device),
        }


def tiles_for(num_rows: int, weight_OK: Tensor) -> Tiles:
    """Choose the most rows per tile that keep the device busy; long sums are split into shares."""
    num_outputs, num_inputs = weight_OK.shape
    is_long = num_inputs >= 2048
    rows, wanted = (_MAX_TILE_ROWS, _BUSY_LONG) if is_long else (64, _BUSY)
    tall = triton.cdiv(num_outputs, OUTPUTS)
    while rows > 16 and (rows >= 2 * num_rows or tall * triton.cdiv(num_rows, rows) < wanted):
        rows //= 2
    tiles = tall * triton.cdiv(num_rows, rows)
    shares = min(max(_SHARED // tiles, 1), 4) if is_long else 1
    stages = min(_STAGE_BYTES // (_INPUT_BYTES * (OUTPUTS + rows)), 6)
    return Tiles(rows, _INPUT_BYTES // weight_OK.itemsize, stages, shares)


def tiles_for_gated(num_rows: int, weight_OK: Tensor) -> Tiles:
    """Tiles are many: they hold as many rows as there are, and two fit where one is computed."""
    rows = _gated_rows(num_rows)
    num_bytes = _INPUT_BYTES // 2 if rows == _MAX_TILE_ROWS else _INPUT_BYTES
    return Tiles(rows, num_bytes // weight_OK.itemsize, stages=3)


def _gated_rows(num_rows: int) -> int:
    return min(max(triton.next_power_of_2(num_rows), 16), _MAX_TILE_ROWS)


def can_multiply(weight_OK: Tensor | None) -> bool:
    """Return whether the kernel supports a matrix: 16 bits on Hopper, rows at multiples of 16
    bytes."""
    if weight_OK is None or weight_OK.stride(0) * weight_OK.itemsize % 16:
        return False
    return not weight_OK.is_cuda or (weight_OK.itemsize == 2 and can_start_early(weight_OK.device))


def are_better(num_rows: int, num_gates: int, *, has_adapters: bool) -> bool:
    """Than a library's products: for rows that are not many, while all tiles of the widest product
    can be computed at once. With adapters always, for which a library takes further launches."""
    grid = Tiles(_gated_rows(num_rows), 1, 1).grid(num_rows, num_gates)
    return num_rows <= MAX_ROWS and (has_adapters or math.prod(grid) <= _FULL)


class Scratch:
    """Room for the sums that shares of the inputs leave, one product after the other."""

    def __init__(self, device: torch.device) -> None:
        size = _SHARED * OUTPUTS * _MAX_TILE_ROWS
        self.sums = torch.empty(size, device=device, dtype=torch.float32)
        self.arrived = torch.zeros(_SHARED, device=device, dtype=torch.int32)
