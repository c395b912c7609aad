"""Sends weights through files that hold only the changes since the version published before.

    new weights, the last published ones -> differences (delta_code.py) -> a file for each bucket
    -> receiver: its copy of the last ones + differences -> new weights, verified by checksum

The checksum of an entry is that of the new tensor, so a difference from other weights is always
detected. Sender and receivers each keep the last version in host memory. If they have no common
last version (at the first publication of a transport, and after one that failed), all weights are
sent whole. A single tensor is sent whole if that takes fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from homeostat.errors import SyncError
from homeostat.sync.bucket import Bucket, TensorEntry
from homeostat.sync.checksum import bytes_of
from homeostat.sync.delta_code import Bytes, decode, encode, words_of
from homeostat.sync.disk import DiskPacker, write_weights
from homeostat.sync.layout import Named, entries_of, flat_bytes, verified

FIRST = "the engine holds no weights that were sent by this transport"
BROKEN_OFF = "the publication before it broke off"


@dataclass(frozen=True, slots=True)
class Part:
    """The place of a tensor in the file, and whether it is stored as a difference."""

    start: int
    num_bytes: int
    is_delta: bool


@dataclass(frozen=True, slots=True)
class DeltaBucket(Bucket):
    """`base` is the number of the publication that the differences refer to. Without one all
    tensors are whole, and `why_whole` is the reason.
    """

    file: Path
    parts: tuple[Part, ...]
    number: int
    base: int | None
    why_whole: str

    @property
    def sent_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def whole_because(self) -> str:
        return self.why_whole


class DeltaPacker(DiskPacker):
    """`token` belongs to one transport, so that no other packer is taken for this one."""

    def __init__(self, folder: Path, prefix: str, bucket_bytes: int, token: str) -> None:
        super().__init__(folder, prefix, bucket_bytes)
        self.token = token
        self._last: dict[str, Bytes] = {}
        self._number = 0
        self._base: int | None = None
        self._why_whole = FIRST

    def pack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        self._number += 1
        is_complete = False
        try:
            yield from super().pack(weights)
            is_complete = True
        finally:
            self._base = self._number if is_complete else None
            self._why_whole = "" if is_complete else BROKEN_OFF

    def close(self) -> None:
        super().close()
        self._last.clear()
        self._base, self._why_whole = None, FIRST

    def _bucket(self, path: Path, named: Named) -> Bucket:
        entries = entries_of(named)
        contents = [self._content(name, tensor) for name, tensor in named]
        parts, start = [], 0
        for content, is_delta in contents:
            parts.append(Part(start, len(content), is_delta))
            start += len(content)
        file = path.with_suffix(".delta")
        write_weights(file, b"".join(content for content, _ in contents))
        return DeltaBucket(
            entries,
            flat_bytes(entries),
            file=file,
            parts=tuple(parts),
            number=self._number,
            base=self._base,
            why_whole=self._why_whole,
        )

    def _content(self, name: str, tensor: Tensor) -> tuple[bytes, bool]:
        """Return the bytes to send, and whether they are a difference. Keeps the new version."""
        new = bytes_of(tensor.detach().to("cpu", copy=True)).numpy()
        old, self._last[name] = self._last.get(name), new
        if self._base is not None and old is not None and len(old) == len(new):
            size = tensor.dtype.itemsize
            difference = encode(words_of(old, size), words_of(new, size))
            if len(difference) < len(new):
                return difference, True
        return new.tobytes(), False


class DeltaReceiver:
    def __init__(self) -> None:
        self._last: dict[str, Bytes] = {}
        self._number: int | None = None

    def unpack(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(bucket, DeltaBucket), bucket
        if bucket.number != self._number:
            if bucket.base not in (None, self._number):
                raise SyncError(
                    f"{bucket.entries[0].describe()} came as a difference to publication "
                    f"{bucket.base}, and this engine holds {self._number}. Open a new transport: "
                    "its first publication sends all weights."
                )
            self._number = bucket.number
        try:
            content = bucket.file.read_bytes()
        except OSError as error:
            raise SyncError(
                f"cannot read {bucket.file} with {bucket.entries[0].describe()}: {error}. Does "
                "the engine see the folder that sync.transport.folder names?"
            ) from None
        arrays = [
            self._array(entry, part, content)
            for entry, part in zip(bucket.entries, bucket.parts, strict=True)
        ]
        tensors = [
            _tensor(array, entry) for array, entry in zip(arrays, bucket.entries, strict=True)
        ]
        named = verified(bucket, tensors, transport=DeltaTransport.name)
        self._last |= {entry.name: one for entry, one in zip(bucket.entries, arrays, strict=True)}
        yield from named

    def _array(self, entry: TensorEntry, part: Part, content: bytes) -> Bytes:
        data = content[part.start : part.start + part.num_bytes]
        try:
            if part.is_delta:
                return decode(words_of(self._last[entry.name], entry.dtype.itemsize), data).view(
                    np.uint8
                )
            if len(data) != entry.num_bytes:
                raise ValueError(f"it has {len(data)} bytes")
        except ValueError as error:
            raise SyncError(
                f"{entry.describe()} was altered on its way by {DeltaTransport.name}: {error}. The "
                "engine must not serve it."
            ) from None
        return np.frombuffer(data, dtype=np.uint8).copy()

    def close(self) -> None:
        self._last.clear()
        self._number = None


def _tensor(array: Bytes, entry: TensorEntry) -> Tensor:
    # The strides of an empty array may be anything, and not all of them can be viewed.
    flat = torch.from_numpy(array).view(entry.dtype) if len(array) else torch.empty(0)
    return flat.to(entry.dtype).view(entry.shape)


@dataclass(frozen=True)
class DeltaTransport:
    folder: Path
    prefix: str
    bucket_bytes: int
    token: str
    name: ClassVar[str] = "delta"

    def packer(self) -> DeltaPacker:
        return DeltaPacker(self.folder, self.prefix, self.bucket_bytes, self.token)

    def receiver(self, rank: int, size: int) -> DeltaReceiver:
        return DeltaReceiver()
