"""INT4 matrices in the layout that the decode kernels read.

A tile is 16 outputs by 64 inputs, in the order in which the threads of a warp hold it when they
multiply by it on tensor cores. Each thread's part is 16 neighbouring bytes, so that a warp reads a
tile at once, and no number moves from one thread to another. The part of thread 4 g + t is eight
words of 16 bits, for

    outputs g and 8 + g  x  inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9

and in each word four integers, for these inputs and those 16, 32 and 48 further on (its planes).

Outputs are padded to whole tiles, and inputs to whole tiles and groups. The scales of a tile's
outputs lie beside each other, group by group.

Suffixes: `_O` outputs, `_K` inputs, `_T` tiles of outputs, `_B` tiles of inputs, `_W` words of a
tile, `_G` groups, `_P` the 16 outputs of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from homeostat.ops import kernels
from homeostat.precision.int4 import OFFSET, Quantised, quantise

TILE_OUTPUTS, TILE_INPUTS, TILE_WORDS = 16, 64, 256
# A tile as outputs and inputs: halves of 8 outputs, outputs, planes, halves of 8 inputs, pairs of
# inputs, inputs of a pair. And as threads read it: the plane is the place in a word.
_TILE = (2, 8, 4, 2, 4, 2)
_AS_READ = (1, 4, 0, 3, 5, 2)


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A weight [O, K] in INT4: words of four integers, and scales in bf16."""

    words_TBW: Tensor
    scales_TGP: Tensor
    num_outputs: int
    num_inputs: int
    group_size: int

    @property
    def num_tiles(self) -> int:
        """Return the number of tiles of outputs."""
        return self.words_TBW.shape[0]

    @property
    def unit(self) -> int:
        """Return the smallest number of inputs that makes both whole tiles and whole groups."""
        return max(self.group_size, TILE_INPUTS)

    @property
    def num_units(self) -> int:
        return self.words_TBW.shape[1] * TILE_INPUTS // self.unit

    @property
    def num_bytes(self) -> int:
        return self.words_TBW.nbytes + self.scales_TGP.nbytes

    @classmethod
    def of(cls, weights: Sequence[Quantised]) -> Int4Matrix:
        """Lay out matrices that have the same inputs, one below the other."""
        num_inputs = weights[0].values_K.shape[-1]
        group_size = num_inputs // weights[0].scales_G.shape[-1]
        values_OK = torch.cat([weight.values_K for weight in weights])
        scales_OG = torch.cat([weight.scales_G for weight in weights])
        num_outputs = len(values_OK)
        below = -num_outputs % TILE_OUTPUTS
        beside = -num_inputs % max(group_size, TILE_INPUTS)
        nibbles_OK = functional.pad((values_OK + OFFSET).to(torch.uint8), (0, beside, 0, below))
        scales_OG = functional.pad(scales_OG, (0, beside // group_size, 0, below))
        # bf16 holds a scale exactly: it has five significant bits.
        scales_TPG = scales_OG.to(torch.bfloat16).unflatten(0, (-1, TILE_OUTPUTS))
        return cls(
            _words(nibbles_OK),
            scales_TPG.transpose(1, 2).contiguous(),
            num_outputs,
            num_inputs,
            group_size,
        )

    @classmethod
    def of_weights(cls, weights: Sequence[Tensor], *, group_size: int) -> Int4Matrix:
        """Quantise matrices that have the same inputs, and lay them out one below the other."""
        return cls.of([quantise(weight, group_size=group_size) for weight in weights])

    def copy_(self, other: Int4Matrix) -> None:
        """Copy another matrix of the same shape into this one's memory."""
        self.words_TBW.copy_(other.words_TBW)
        self.scales_TGP.copy_(other.scales_TGP)

    def dequantised(self, *, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Return the weight [O, K] that it stands for, or some of its rows."""
        start, stop, _ = rows.indices(self.num_outputs)
        if kernels.fused(self.scales_TGP):
            from homeostat.rollout.native.cuda.int4_dense import dense

            return dense(
                self.words_TBW,
                self.scales_TGP,
                start,
                stop,
                num_inputs=self.num_inputs,
                group_size=self.group_size,
                dtype=dtype,
            )
        tiles = slice(start // TILE_OUTPUTS, -(-stop // TILE_OUTPUTS))
        nibbles_OK = _nibbles(self.words_TBW[tiles])
        scales_OG = self.scales_TGP[tiles].transpose(1, 2).flatten(0, 1).float()
        integers = nibbles_OK.float().unflatten(1, (-1, self.group_size)) - OFFSET
        weight_OK = (integers * scales_OG[..., None]).flatten(1)
        first = tiles.start * TILE_OUTPUTS
        return weight_OK[start - first : stop - first, : self.num_inputs].to(dtype).contiguous()


def _words(nibbles_OK: Tensor) -> Tensor:
    """Pack integers from 0 to 15, [O, K], into tiles of words."""
    tiles = nibbles_OK.unflatten(1, (-1, TILE_INPUTS)).unflatten(0, (-1, TILE_OUTPUTS))
    tiles = tiles.transpose(1, 2).reshape(*tiles.shape[:1], tiles.shape[2], *_TILE)
    parts = tiles.permute(0, 1, *(2 + axis for axis in _AS_READ)).flatten(2, 6).to(torch.int32)
    planes = parts << torch.arange(0, 16, 4, dtype=torch.int32, device=parts.device)
    # The highest bit of a word is the sign of an int16.
    return planes.sum(-1, dtype=torch.int32).to(torch.int16)


def _nibbles(words_TBW: Tensor) -> Tensor:
    """Unpack tiles of words into integers from 0 to 15, [O, K]."""
    planes = torch.arange(0, 16, 4, dtype=torch.int32, device=words_TBW.device)
    parts = (words_TBW.to(torch.int32)[..., None] >> planes) & 15
    sizes = [_TILE[axis] for axis in _AS_READ]
    back = [2 + _AS_READ.index(axis) for axis in range(len(_TILE))]
    tiles = parts.reshape(*words_TBW.shape[:2], *sizes).permute(0, 1, *back)
    tiles = tiles.reshape(*words_TBW.shape[:2], TILE_OUTPUTS, TILE_INPUTS).transpose(1, 2)
    return tiles.flatten(2).flatten(0, 1)
