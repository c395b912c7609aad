"""Check that a GGUF file is complete before a library reads it.

The `gguf` library trusts every length and offset that a file states: a truncated download or a
wrong number gives it short arrays, errors of any class, or a loop over 10^12 items. This module
reads the same header once and checks every length against the size of the file:

    magic, version, number of tensors and of metadata entries
    metadata: (key, type, value) ...
    tensors: (name, sizes, type, offset into the data) ...
    padding, then the data of the tensors, which must lie inside the file

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from homeostat.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# The number of bytes of each fixed-size metadata type.
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_UINT32 = 4
_MAX_DIMS = 4
_MAX_NESTED_ARRAYS = 4
_DEFAULT_ALIGNMENT = 32


class _FrameError(Exception):
    """The header is invalid; the message says why."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """The part of the file that should hold the data of a tensor."""

    name: str
    offset: int
    num_bytes: int


def require_whole(path: Path, *, setting: str) -> None:
    """Raise ModelError unless every length and offset lies inside the file."""
    try:
        with path.open("rb") as file, _mapped(file.fileno()) as data:
            _Frame(data).check()
    except OSError as error:
        raise ModelError(f"{setting}: cannot read {path}: {error.strerror}.") from None
    except _FrameError as error:
        raise ModelError(
            f"{setting}: {path} cannot be read as GGUF; it is corrupt or truncated ({error}). "
            "Download it again, and compare its size with the source's."
        ) from None


def _mapped(descriptor: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise _FrameError("it is empty") from None


class _Frame:
    """One pass over the header; `at` is the next byte to read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0
        self.order = "<"
        self.alignment = _DEFAULT_ALIGNMENT

    def check(self) -> None:
        if self._take(4, "the magic number") != _MAGIC:
            raise _FrameError("it does not begin with the letters GGUF")
        version = self._number("I", "the version")
        if version & 0xFFFF == 0:
            # The file was written on a machine of the other byte order.
            self.order = ">"
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in _VERSIONS:
            raise _FrameError(f"version {version} is not one of {_VERSIONS}")
        num_tensors = self._number("Q", "the number of tensors")
        num_fields = self._number("Q", "the number of metadata entries")
        for _ in range(num_fields):
            self._field()
        extents = [self._tensor() for _ in range(num_tensors)]
        self._require_data(extents)

    def _require_data(self, extents: list[_Extent]) -> None:
        start = -(-self.at // self.alignment) * self.alignment
        ends = [start + extent.offset + extent.num_bytes for extent in extents]
        if not ends or max(ends) <= self.size:
            return
        beyond = [extent.name for extent, end in zip(extents, ends, strict=True) if end > self.size]
        raise _FrameError(
            f"it has {self.size} bytes and its tensors reach to byte {max(ends)}: the data of "
            f"{len(beyond)} of {len(extents)} tensors is missing, first that of {beyond[0]!r:.80}"
        )

    def _field(self) -> None:
        key = self._text("a metadata key")
        kind = self._number("I", f"the type of {key}")
        if key == "general.alignment" and kind == _UINT32:
            self.alignment = self._number("I", key)
            if self.alignment == 0 or self.alignment & (self.alignment - 1):
                raise _FrameError(f"general.alignment is {self.alignment}, which is no power of 2")
            return
        self._value(kind, key, depth=0)

    def _value(self, kind: int, key: str, *, depth: int) -> None:
        if kind in _SCALAR_BYTES:
            self._skip(_SCALAR_BYTES[kind], key)
        elif kind == _STRING:
            self._skip(self._number("Q", key), key)
        elif kind == _ARRAY and depth < _MAX_NESTED_ARRAYS:
            item, count = self._number("I", key), self._number("Q", key)
            if item in _SCALAR_BYTES:
                self._skip(_SCALAR_BYTES[item] * count, key)
                return
            for _ in range(count):
                self._value(item, key, depth=depth + 1)
        else:
            raise _FrameError(f"{key} has the unknown type {kind}")

    def _tensor(self) -> _Extent:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._text("a tensor's name")
        num_dims = self._number("I", name)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise _FrameError(f"{name!r:.80} has {num_dims} dimensions")
        sizes = [self._number("Q", name) for _ in range(num_dims)]
        kind, offset = self._number("I", name), self._number("Q", name)
        if kind not in {int(known) for known in GGMLQuantizationType}:
            raise _FrameError(f"{name!r:.80} has the unknown tensor type {kind}")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if sizes[0] % block:
            raise _FrameError(f"rows of {name!r:.80} have {sizes[0]} values, in blocks of {block}")
        count = 1
        for size in sizes:
            count *= size
        if count == 0:
            raise _FrameError(f"{name!r:.80} has no values")
        return _Extent(name, offset, count // block * block_bytes)

    def _text(self, what: str) -> str:
        raw = self._take(self._number("Q", what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _FrameError(f"{what} is no UTF-8 text") from None

    def _number(self, form: str, what: str) -> int:
        [value] = struct.unpack(self.order + form, self._take(struct.calcsize(form), what))
        return value

    def _take(self, count: int, what: str) -> bytes:
        start = self.at
        self._skip(count, what)
        return self.data[start : self.at]

    def _skip(self, count: int, what: str) -> None:
        if self.at + count > self.size:
            raise _FrameError(f"it ends at byte {self.size}, inside {what!r:.80}")
        self.at += count
