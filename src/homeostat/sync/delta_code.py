"""The difference between two versions of a tensor: which numbers changed, and by which bits.

    changes -> distances between them, old XOR new -> byte planes -> zlib

An update of bf16 weights moves few numbers, and those by one unit in the last place: the distances
are small and the bits that differ few, so that most byte planes are zeros. A number is compared by
its bits, so that NaNs and signed zeros are distinguished.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.unsignedinteger]

_LEVEL = 1
_MAX_WORD = 8


def words_of(data: Bytes, itemsize: int) -> Words:
    """View raw bytes as unsigned numbers of the tensor's element size."""
    return data.view(np.dtype(f"<u{min(itemsize, _MAX_WORD)}"))


def encode(old: Words, new: Words) -> bytes:
    """Return what `decode` needs to make `new` of `old`."""
    at = np.flatnonzero(old != new)
    distances = np.diff(at, prepend=-1).astype("<u8")
    bits = old[at] ^ new[at]
    head = np.array([len(at)], dtype="<u8").tobytes()
    return head + zlib.compress(_planes(distances) + _planes(bits), _LEVEL)


def decode(old: Words, data: bytes) -> Words:
    """Return the new version. Raises ValueError if `data` is damaged or does not fit."""
    count = int(np.frombuffer(data[:8], dtype="<u8")[0])
    try:
        planes = zlib.decompress(data[8:])
    except zlib.error as error:
        raise ValueError(f"it cannot be decompressed ({error})") from None
    if len(planes) != count * (8 + old.itemsize):
        raise ValueError(f"it has {len(planes)} bytes for {count} changes")
    distances = _from_planes(planes[: 8 * count], np.dtype("<u8"))
    at = np.cumsum(distances.astype(np.int64)) - 1
    if count and (at[-1] >= len(old) or (distances == 0).any()):
        raise ValueError(f"a change is outside of {len(old)} numbers")
    new = old.copy()
    new[at] ^= _from_planes(planes[8 * count :], old.dtype)
    return new


def num_changes(data: bytes) -> int:
    """Return the number of elements that an encoded difference changes."""
    return int(np.frombuffer(data[:8], dtype="<u8")[0])


def _planes(words: Words) -> bytes:
    """The lowest bytes of all words, then the next ones, and so on."""
    return words.view(np.uint8).reshape(-1, words.itemsize).T.tobytes()


def _from_planes(planes: bytes, dtype: np.dtype) -> Words:
    table = np.frombuffer(planes, dtype=np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(table.T).view(dtype).reshape(-1)
