"""Checksums of tensors: over the bits, the same on every device, and dependent on their order.

The bits are taken as unsigned 64-bit words x, in rows of 4096. With fixed odd multipliers m and q,

    checksum = sum_r q[r] * sum_c m[c] * mix(x[r, c])   modulo 2**64,   mix(x) = x ^ (x >> 32)

`mix` is a bijection and odd numbers have inverses, so that one altered word always changes the
sum. Two words that change places add (mix(x) - mix(y)) * (difference of multipliers); that
difference is even, which is why `mix` brings the upper half, where floats keep sign and exponent,
down to the lower. Integers wrap around and add up to the same in any order: no device, block size
or reduction tree can make a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

_ROW_WORDS = 4096
_WORD_BYTES = 8
# Rows at a time: half a megabyte stays in a core's cache; a GPU wants fewer, larger kernels.
_CPU_ROWS = 16
_GPU_ROWS = 1024
_COLUMNS, _ROWS = 1, 2


def tensor_checksum(tensor: Tensor) -> int:
    """Checksum of the tensor's raw bytes; independent of dtype, strides and device."""
    return tensor_checksums([tensor])[0]


def tensor_checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Checksums of several tensors, with one transfer from the device for all of them."""
    if not tensors:
        return []
    device = tensors[0].device
    sums = torch.stack([_sum(bytes_of(tensor)).to(device) for tensor in tensors])
    return [value % 2**64 for value in sums.tolist()]


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes in order, as a flat tensor: a view where it is contiguous."""
    if tensor.numel() == 0:
        # Its strides may be anything, and not all of them can be viewed.
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _sum(data: Tensor) -> Tensor:
    whole, rest = _words(data)
    rows_RC = whole.view(-1, _ROW_WORDS)
    column_C = _multipliers(_COLUMNS, data.device)
    step = _CPU_ROWS if data.device.type == "cpu" else _GPU_ROWS
    parts = [_row_sums(rows_RC[at : at + step], column_C) for at in range(0, len(rows_RC), step)]
    parts.append(_row_sums(rest[None], column_C[: len(rest)]))
    sums_R = torch.cat(parts)
    q_R = torch.from_numpy(_odd_numbers(_ROWS, len(sums_R))).to(data.device)
    return (sums_R * q_R).sum()


def _row_sums(words_RC: Tensor, column_C: Tensor) -> Tensor:
    # The mask makes the shift of signed words a logical one.
    upper_RC = (words_RC >> 32).bitwise_and_(0xFFFFFFFF)
    return upper_RC.bitwise_xor_(words_RC).mul_(column_C).sum(1)


def _words(data: Tensor) -> tuple[Tensor, Tensor]:
    """Whole rows of 64-bit words, and the words that are left, the last filled up with zeros."""
    if data.storage_offset() % _WORD_BYTES or data.data_ptr() % _WORD_BYTES:
        data = data.clone()
    row_bytes = _ROW_WORDS * _WORD_BYTES
    whole, rest = data.split([len(data) // row_bytes * row_bytes, len(data) % row_bytes])
    rest = torch.nn.functional.pad(rest, (0, -len(rest) % _WORD_BYTES))
    return whole.view(torch.int64), rest.view(torch.int64)


@cache
def _multipliers(stream: int, device: torch.device) -> Tensor:
    return torch.from_numpy(_odd_numbers(stream, _ROW_WORDS)).to(device)


def _odd_numbers(stream: int, count: int) -> np.ndarray:
    """The first odd numbers of a stream of SplitMix64."""
    z = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 48)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)
