"""Read the header of a GGUF file fast. The only module that changes the `gguf` library.

gguf's own reader makes several memory-mapped arrays for every token of the vocabulary, which takes
about 5 s of CPU time for 49,000 tokens and 49,000 merges. `FastReader` gives the same fields from
one pass over the bytes, in about a tenth of that. `fast_reading` also makes transformers use it,
which reads a tokenizer out of the file with gguf's reader.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_STRING, _ARRAY = 8, 9


def open_gguf(path: Path) -> Any:
    """Open a file whose lengths were checked (ops/gguf_frame.py), with gguf's interface."""
    return _fast_reader()(path)


@contextmanager
def fast_reading() -> Iterator[None]:
    """Make `gguf.GGUFReader` the fast reader for the duration of the block."""
    import gguf

    before = gguf.GGUFReader
    gguf.GGUFReader = _fast_reader()
    try:
        yield
    finally:
        gguf.GGUFReader = before


@cache
def _fast_reader() -> Any:
    """Return the class; it derives from gguf's, which may not be installed."""
    from gguf import GGUFReader
    from gguf.constants import GGUFValueType

    class FastReader(GGUFReader):
        """gguf's reader with another way to read arrays of texts and numbers."""

        def _get_field_parts(
            self, orig_offs: int, raw_type: int
        ) -> tuple[int, list[Any], list[int], list[Any]]:
            if int(raw_type) != _ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            item, start = GGUFValueType(int(kind[0])), orig_offs + 12
            number = self.gguf_scalar_to_np.get(item)
            if int(count[0]) == 0 or (number is None and int(item) != _STRING):
                return super()._get_field_parts(orig_offs, raw_type)
            if number is not None:
                values = self._get(start, number, int(count[0])).view(np.ndarray)
                parts, end = [values[n : n + 1] for n in range(len(values))], start + values.nbytes
                data = list(range(2, 2 + len(parts)))
            else:
                parts, end = _texts(self.data, start, int(count[0]), self.byte_order)
                data = list(range(3, 3 + len(parts), 2))
            types = [GGUFValueType(_ARRAY), item]
            return end - orig_offs, [kind, count, *parts], data, types

    return FastReader


def _texts(data: Any, start: int, count: int, byte_order: str) -> tuple[list[Any], int]:
    """Return length and bytes of each text, as arrays, and where the last one ends."""
    # Views of plain arrays: those of a memory map cost ten times as much to make.
    whole = np.asarray(data).view(np.ndarray)
    length = struct.Struct("<Q" if _is_little(byte_order) else ">Q")
    sizes = np.dtype(np.uint64).newbyteorder(byte_order)
    parts, at = [], start
    for _ in range(count):
        (size,) = length.unpack_from(whole, at)
        parts.append(whole[at : at + 8].view(sizes))
        parts.append(whole[at + 8 : at + 8 + size])
        at += 8 + size
    return parts, at


def _is_little(byte_order: str) -> bool:
    """Return whether numbers are little-endian; gguf calls the host's order I, the other one S."""
    host_is_little = np.dtype("<u2").isnative
    return host_is_little != (byte_order == "S")
