"""Sends weights through memory that two processes on one machine map: files in /dev/shm.

The sender has one segment, which it fills again for each bucket: memory is bounded by the larger of
`bucket_bytes` and the largest tensor. The segment's name carries a digest of the run's folder and
the sender's process id; the sender holds a lock on it, so that the next sender of the same run
recognises and removes the segments of killed senders. These are plain files, not
`multiprocessing.shared_memory`, whose resource tracker unlinks what another process still uses.
macOS has no /dev/shm: there the files are in the temporary folder, and the system keeps their pages
in memory while there is room.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from homeostat.errors import SyncError
from homeostat.observe.durable import OUT_OF_SPACE
from homeostat.sync.bucket import Bucket
from homeostat.sync.layout import entries_of, fill, flat_bytes, grouped, verified, views
from homeostat.sync.presence import hold, remove_unheld

ROOT = Path("/dev/shm") if sys.platform == "linux" else Path(tempfile.gettempdir())
_ZEROS = bytes(2**20)


@dataclass(frozen=True, slots=True)
class SharedMemoryBucket(Bucket):
    segment: Path


class SharedMemoryPacker:
    def __init__(self, prefix: str, bucket_bytes: int) -> None:
        self.prefix = prefix
        self.bucket_bytes = bucket_bytes
        self._segment: _Segment | None = None

    def pack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        if self._segment is None:
            _remove_stale(self.prefix)
            self._segment = _Segment(ROOT / f"{self.prefix}-{os.getpid()}-{secrets.token_hex(4)}")
        segment = self._segment
        for named in grouped(weights, bucket_bytes=self.bucket_bytes):
            entries = entries_of(named)
            num_bytes = flat_bytes(entries)
            try:
                fill(segment.room(num_bytes), named)
            except OSError as error:
                self.close()
                raise SyncError(_why_no_room(error, num_bytes)) from None
            yield SharedMemoryBucket(entries, num_bytes, segment.path)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class SharedMemoryReceiver:
    def __init__(self) -> None:
        self._path: Path | None = None
        self._flat = torch.empty(0, dtype=torch.uint8)

    def unpack(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(bucket, SharedMemoryBucket), bucket
        if bucket.segment != self._path or len(self._flat) < bucket.num_bytes:
            self._path, self._flat = bucket.segment, _attached(bucket)
        tensors = views(self._flat, bucket.entries)
        yield from verified(bucket, tensors, transport=SharedMemoryTransport.name)

    def close(self) -> None:
        self._path, self._flat = None, torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class SharedMemoryTransport:
    """`prefix` belongs to the run. Segments get it as a prefix of their names, by which stale ones
    are recognised.
    """

    prefix: str
    bucket_bytes: int
    name: ClassVar[str] = "shared_memory"

    def packer(self) -> SharedMemoryPacker:
        return SharedMemoryPacker(self.prefix, self.bucket_bytes)

    def receiver(self, rank: int, size: int) -> SharedMemoryReceiver:
        return SharedMemoryReceiver()


class _Segment:
    """A file in memory that its maker holds, and that grows as needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = hold(path)
        except OSError as error:
            raise SyncError(
                f"cannot make {path}: {error.strerror}. Set sync.transport.type to disk where "
                f"there is no {ROOT}, or it may not be written."
            ) from None
        self._flat = torch.empty(0, dtype=torch.uint8)
        # A process that ends by an error may never get to close it, and memory is scarce.
        self._remove = weakref.finalize(self, _remove_own, path, os.getpid())

    def room(self, num_bytes: int) -> Tensor:
        if len(self._flat) < num_bytes:
            # Unlike a truncated file, whose pages come as they are touched, this fails here and
            # not by a bus error later.
            _allocate(self._descriptor, num_bytes)
            self._flat = _mapped(self._descriptor)
        return self._flat

    def close(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._remove()
        os.close(self._descriptor)


def _allocate(descriptor: int, num_bytes: int) -> None:
    """Give a file this length, and allocate all its bytes. Raises OSError if there is no room."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
        return
    # macOS has no such call.
    for start in range(os.fstat(descriptor).st_size, num_bytes, len(_ZEROS)):
        os.pwrite(descriptor, _ZEROS[: num_bytes - start], start)


def _remove_own(path: Path, maker: int) -> None:
    # Not in a fork of the maker.
    if os.getpid() == maker:
        path.unlink(missing_ok=True)


def _mapped(descriptor: int) -> Tensor:
    # The tensor holds the map, which ends with the last view of it.
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)


def _attached(bucket: SharedMemoryBucket) -> Tensor:
    if bucket.num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        descriptor = os.open(bucket.segment, os.O_RDWR)
    except OSError as error:
        raise SyncError(
            f"cannot open {bucket.segment} with {bucket.entries[0].describe()}: "
            f"{error.strerror}. Is the sender still alive, and on this machine?"
        ) from None
    try:
        if os.fstat(descriptor).st_size < bucket.num_bytes:
            raise SyncError(f"{bucket.segment} is shorter than {bucket.entries[-1].describe()}.")
        return _mapped(descriptor)
    finally:
        os.close(descriptor)


def _remove_stale(prefix: str) -> None:
    for path in ROOT.glob(f"{prefix}-*"):
        remove_unheld(path)


def _why_no_room(error: OSError, num_bytes: int) -> str:
    if error.errno not in OUT_OF_SPACE:
        return f"cannot write to {ROOT}: {error.strerror}. Set sync.transport.type to disk."
    return (
        f"{ROOT} has no room for a bucket of {num_bytes / 1e6:.4g} MB ({error.strerror}). Lower "
        "sync.transport.bucket_bytes (a bucket is never smaller than one tensor), give it more "
        "room (docker run --shm-size), or set sync.transport.type to disk."
    )
