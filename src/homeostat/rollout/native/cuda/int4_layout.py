"""INT4 matrices in the layout that the decode kernels read.

Two neighbouring groups of an output's inputs are a block. They share bytes: the low half of byte j
holds integer j of the first group, the high half that of the second. So the low halves of a block's
bytes are one group, in order, and the high halves the other, and a product takes a group at a time
without shuffling. Inputs are padded with zeros to whole blocks. The scales of a block's two groups
are neighbours, so that they can be read as one word.

Suffixes: `_O` outputs, `_K` inputs, `_H` bytes, each of two integers, `_G` groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from homeostat.ops import kernels
from homeostat.precision.int4 import OFFSET, Quantised, quantise


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A weight [O, K] in INT4: bytes [O, H] of two integers each, and scales [O, G] in bf16."""

    bytes_OH: Tensor
    scales_OG: Tensor
    num_inputs: int
    group_size: int

    @property
    def num_outputs(self) -> int:
        return self.bytes_OH.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.bytes_OH.shape[1] // self.group_size

    @property
    def num_bytes(self) -> int:
        return self.bytes_OH.nbytes + self.scales_OG.nbytes

    @classmethod
    def of(cls, weights: Sequence[Quantised]) -> Int4Matrix:
        """Lay out matrices of the same inputs, one below the other."""
        num_inputs = weights[0].values_K.shape[-1]
        group_size = num_inputs // weights[0].scales_G.shape[-1]
        values_OK = torch.cat([weight.values_K for weight in weights])
        scales_OG = torch.cat([weight.scales_G for weight in weights])
        padding = -num_inputs % (2 * group_size)
        values_OK = functional.pad(values_OK, (0, padding))
        scales_OG = functional.pad(scales_OG, (0, padding // group_size))
        nibbles = (values_OK + OFFSET).to(torch.uint8).unflatten(1, (-1, 2, group_size))
        bytes_OH = (nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)).flatten(1).contiguous()
        # bf16 holds a scale exactly: it has five significant bits.
        return cls(bytes_OH, scales_OG.to(torch.bfloat16).contiguous(), num_inputs, group_size)

    @classmethod
    def of_weights(cls, weights: Sequence[Tensor], *, group_size: int) -> Int4Matrix:
        """Quantise matrices of the same inputs, and lay them out one below the other."""
        return cls.of([quantise(weight, group_size=group_size) for weight in weights])

    def copy_(self, other: Int4Matrix) -> None:
        """Take over the numbers of another matrix of the same shape, in place."""
        self.bytes_OH.copy_(other.bytes_OH)
        self.scales_OG.copy_(other.scales_OG)

    def dequantised(self, *, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Return the weight [O, K] that it stands for, or some of its rows."""
        bytes_OH, scales_OG = self.bytes_OH[rows], self.scales_OG[rows]
        if kernels.fused(scales_OG):
            from homeostat.rollout.native.cuda.int4_dense import dense

            return dense(bytes_OH, scales_OG, self, dtype=dtype)
        blocks = bytes_OH.unflatten(1, (-1, 1, self.group_size))
        halves = torch.cat([blocks & 15, blocks >> 4], dim=2).to(torch.float32) - OFFSET
        grouped = halves.flatten(1, 2) * scales_OG.float()[..., None]
        return grouped.flatten(1)[:, : self.num_inputs].to(dtype).contiguous()
