"""Checksums of tensors: over the bits, the same on every device, and dependent on their order.

The bits are taken as unsigned 64-bit words x, in rows of 4096. With fixed odd multipliers m and q,

    checksum = sum_r q[r] * sum_c m[c] * mix(x[r, c])   modulo 2**64,   mix(x) = x ^ (x >> 32)

`mix` is a bijection and odd numbers have inverses, so that one altered word always changes the sum.
Two words that change places add (mix(x) - mix(y)) * (difference of multipliers); that difference is
even, so `mix` moves the upper half, which holds sign and exponent of floats, to the lower half.
Integers wrap around, and their sum is the same in any order, so the result does not depend on
device, block size or reduction tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from homeostat.ops import kernels

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
    is_one_place = all(tensor.device == device for tensor in tensors)
    if is_one_place and kernels.fused(torch.empty(0, device=device)):
        sums = _fused_sums(tensors)
    else:
        sums = torch.stack([_sum(bytes_of(tensor)).to(device) for tensor in tensors])
    return [value % 2**64 for value in sums.tolist()]


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes in order, as a flat tensor: a view where it is contiguous."""
    if tensor.numel() == 0:
        # Its strides may be anything, and not all of them can be viewed.
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _fused_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Checksums of all tensors by one kernel over their rows: a model has hundreds of them, and
    each would take a dozen launches."""
    # Imported here: Triton takes a second.
    from homeostat.ops.kernels.checksum import row_sums

    device = tensors[0].device
    data = [_whole_words(bytes_of(tensor)) for tensor in tensors]
    words = np.array([len(one) // _WORD_BYTES for one in data], dtype=np.int64)
    num_rows = -(-words // _ROW_WORDS)
    tensor_R = np.repeat(np.arange(len(data)), num_rows)
    row_R = np.arange(len(tensor_R)) - (np.cumsum(num_rows) - num_rows)[tensor_R]
    first = np.array([one.data_ptr() for one in data], dtype=np.int64)
    address_R = first[tensor_R] + row_R * (_ROW_WORDS * _WORD_BYTES)
    words_R = np.minimum(words[tensor_R] - row_R * _ROW_WORDS, _ROW_WORDS)
    table = torch.from_numpy(np.stack([address_R, words_R, row_R, tensor_R])).to(device)
    sums_R = row_sums(table[0], table[1], _multipliers(_COLUMNS, device, _ROW_WORDS))
    most = 1 << int(num_rows.max(initial=1)).bit_length()
    q_R = _multipliers(_ROWS, device, most)[table[2]]
    totals = torch.zeros(len(data), dtype=torch.int64, device=device)
    return totals.index_add_(0, table[3], sums_R * q_R)


def _whole_words(data: Tensor) -> Tensor:
    """The bytes, filled up with zeros to whole words that begin at a multiple of their size."""
    data = torch.nn.functional.pad(data, (0, -len(data) % _WORD_BYTES))
    return data.clone() if data.data_ptr() % _WORD_BYTES else data


def _sum(data: Tensor) -> Tensor:
    whole, rest = _words(data)
    rows_RC = whole.view(-1, _ROW_WORDS)
    column_C = _multipliers(_COLUMNS, data.device, _ROW_WORDS)
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
def _multipliers(stream: int, device: torch.device, count: int) -> Tensor:
    return torch.from_numpy(_odd_numbers(stream, count)).to(device)


def _odd_numbers(stream: int, count: int) -> np.ndarray:
    """The first odd numbers of a stream of SplitMix64."""
    z = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 48)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)
