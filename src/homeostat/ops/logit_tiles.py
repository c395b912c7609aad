"""Split the [M, V] logits of a batch into tiles, of which one is alive at a time.

A tile has at most `VOCAB_CHUNK` vocabulary entries and as many tokens as its bytes allow. Products
are summed in fp32 whatever the dtype of their operands.

Suffixes: `_M` predicted tokens, `_V` vocabulary, `_D` model dim; a tile is named for its own rows
and columns, `_mv`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

import torch
from torch import Tensor

from homeostat.ops import kernels
from homeostat.ops.activations import invariant_tanh
from homeostat.ops.linear import Numerics

VOCAB_CHUNK = 8192


class Entropy(Enum):
    """The part of the entropy that is computed: nothing, its value, or also its gradient."""

    NONE = auto()
    VALUE = auto()
    GRAD = auto()


def vocab_chunks(weight_VD: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, rows) of the weight, in the dtype of the matrix products."""
    native = _multiplies_into_fp32(weight_VD)
    for first in range(0, weight_VD.shape[0], VOCAB_CHUNK):
        weight_vD = weight_VD[first : first + VOCAB_CHUNK]
        yield first, weight_vD if native else weight_vD.float()


def tile_height(chunk_bytes: int, row_bytes: int) -> int:
    """Return the number of tokens in a tile of this width."""
    return max(1, chunk_bytes // row_bytes)


def token_tiles(num_tokens: int, height: int) -> Iterator[slice]:
    """Yield the slices of tokens that form tiles."""
    for start in range(0, num_tokens, height):
        yield slice(start, min(start + height, num_tokens))


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the fp32 product. The operands share a dtype."""
    if left.dtype == torch.float32:
        return torch.mm(left, right)
    if left.is_meta:
        return left.new_empty((left.shape[0], right.shape[1]), dtype=torch.float32)
    return torch.mm(left, right, out_dtype=torch.float32)


def capped_logits(logits: Tensor, soft_cap: float, *, numerics: Numerics) -> Tensor:
    """Return cap * tanh(logits / cap) in the memory of the logits."""
    logits.div_(soft_cap)
    if numerics == "fast":
        return logits.tanh_().mul_(soft_cap)
    return logits.copy_(invariant_tanh(logits)).mul_(soft_cap)


def _multiplies_into_fp32(tensor: Tensor) -> bool:
    """Return whether a product can be summed into an fp32 result.

    This is always true of fp32 operands; on CUDA it is also possible for half-precision operands.
    """
    return tensor.dtype == torch.float32 or (
        kernels.on_cuda(tensor) and tensor.dtype in (torch.bfloat16, torch.float16)
    )
