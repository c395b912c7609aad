"""INT4 matrices in the layout that the decode kernels read.

A block is 256 neighbouring inputs of an output. Its integers are packed into 32 words: word j has
those of inputs j, 32 + j, 64 + j ... in its eight nibbles. So one nibble of all words of a block is
32 neighbouring inputs (a plane), which is what a product takes at a time, and needs no shuffling.
Inputs are padded with zeros to whole blocks. Scales are stored group by group, because a program
reads the scales of neighbouring outputs.

Suffixes: `_O` outputs, `_K` inputs, `_W` words, `_G` groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from homeostat.ops import kernels
from homeostat.precision.int4 import OFFSET, PER_WORD, Quantised, quantise

# Inputs of a plane and of a block.
PLANE = 32
BLOCK = PLANE * PER_WORD


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A weight [O, K] in INT4: words [O, W] of int32, and scales [G, O] in bf16."""

    words_OW: Tensor
    scales_GO: Tensor
    num_inputs: int
    group_size: int

    @property
    def num_outputs(self) -> int:
        return self.words_OW.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.words_OW.shape[1] // PLANE

    @property
    def num_bytes(self) -> int:
        return self.words_OW.nbytes + self.scales_GO.nbytes

    @classmethod
    def of(cls, weights: Sequence[Quantised]) -> Int4Matrix:
        """Lay out matrices of the same inputs, one below the other."""
        num_inputs = weights[0].values_K.shape[-1]
        group_size = num_inputs // weights[0].scales_G.shape[-1]
        values_OK = torch.cat([weight.values_K for weight in weights])
        scales_OG = torch.cat([weight.scales_G for weight in weights])
        padding = -num_inputs % BLOCK
        values_OK = functional.pad(values_OK, (0, padding))
        scales_OG = functional.pad(scales_OG, (0, padding // group_size))
        # bf16 holds a scale exactly: it has five significant bits.
        scales_GO = scales_OG.t().to(torch.bfloat16).contiguous()
        return cls(_words(values_OK), scales_GO, num_inputs, group_size)

    @classmethod
    def of_weights(cls, weights: Sequence[Tensor], *, group_size: int) -> Int4Matrix:
        """Quantise matrices of the same inputs, and lay them out one below the other."""
        return cls.of([quantise(weight, group_size=group_size) for weight in weights])

    def copy_(self, other: Int4Matrix) -> None:
        """Take over the numbers of another matrix of the same shape, in place."""
        self.words_OW.copy_(other.words_OW)
        self.scales_GO.copy_(other.scales_GO)

    def dequantised(self, *, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Return the weight [O, K] that it stands for, or some of its rows."""
        words_OW, scales_GO = self.words_OW[rows], self.scales_GO[:, rows]
        if kernels.fused(scales_GO) and dtype in (torch.bfloat16, torch.float16, torch.float32):
            from homeostat.rollout.native.cuda.int4_dense import dense

            return dense(words_OW, scales_GO, self, dtype=dtype)
        words = words_OW.unflatten(1, (-1, 1, PLANE))
        shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32, device=words.device)
        values = ((words >> shifts[:, None]) & 15) - OFFSET
        grouped = values.flatten(1).unflatten(1, (-1, self.group_size))
        weight = grouped.to(torch.float32) * scales_GO.t().float()[..., None]
        return weight.flatten(1)[:, : self.num_inputs].to(dtype).contiguous()


def _words(values_OK: Tensor) -> Tensor:
    shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32, device=values_OK.device)
    planes = (values_OK.to(torch.int32) + OFFSET).unflatten(1, (-1, PER_WORD, PLANE))
    return (planes << shifts[:, None]).sum(2, dtype=torch.int32).flatten(1).contiguous()
