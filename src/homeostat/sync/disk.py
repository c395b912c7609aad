"""Sends weights through safetensors files in a folder that sender and receivers can both access.

There is one folder per publication and one file per bucket. A file gets its final name only when it
is complete. The folder of a publication is removed when the next one is complete, and the last
folder by `close`, because these files are only for sending.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from homeostat.errors import SyncError
from homeostat.observe.durable import write_atomically
from homeostat.sync.bucket import Bucket
from homeostat.sync.layout import Named, entries_of, flat_bytes, grouped, verified


@dataclass(frozen=True, slots=True)
class DiskBucket(Bucket):
    file: Path


class DiskPacker:
    def __init__(self, folder: Path, prefix: str, bucket_bytes: int) -> None:
        self.folder = folder
        self.prefix = prefix
        self.bucket_bytes = bucket_bytes

    def pack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        earlier = self._publications()
        number = max(earlier, default=0) + 1
        folder = self.folder / f"{self.prefix}-{number:08d}"
        is_complete = False
        try:
            for index, named in enumerate(grouped(weights, bucket_bytes=self.bucket_bytes)):
                yield self._bucket(folder / f"{index:05d}", named)
            is_complete = True
        finally:
            for stale in earlier.values() if is_complete else [folder]:
                shutil.rmtree(stale, ignore_errors=True)

    def _bucket(self, path: Path, named: Named) -> Bucket:
        """Write the tensors to a file of this path, with a suffix of the format."""
        entries = entries_of(named)
        file = path.with_suffix(".safetensors")
        # Copied, because a file cannot hold two tensors that share memory.
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}
        write_weights(file, save({name: one.contiguous() for name, one in tensors.items()}))
        return DiskBucket(entries, flat_bytes(entries), file)

    def close(self) -> None:
        for folder in self._publications().values():
            shutil.rmtree(folder, ignore_errors=True)

    def _publications(self) -> dict[int, Path]:
        own = re.compile(rf"{re.escape(self.prefix)}-(\d+)")
        found = ((own.fullmatch(path.name), path) for path in self.folder.glob("*"))
        return {int(match[1]): path for match, path in found if match}


class DiskReceiver:
    def unpack(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(bucket, DiskBucket), bucket
        try:
            with safe_open(bucket.file, framework="pt", device="cpu") as file:
                tensors = [file.get_tensor(entry.name) for entry in bucket.entries]
        except (SafetensorError, OSError) as error:
            raise SyncError(
                f"cannot read {bucket.file} with {bucket.entries[0].describe()}: {error}. Does "
                "the engine see the folder that sync.transport.folder names?"
            ) from None
        yield from verified(bucket, tensors, transport=DiskTransport.name)

    def close(self) -> None:
        """Do nothing: it holds no open file."""


@dataclass(frozen=True)
class DiskTransport:
    """`prefix` belongs to the run. Other files in the folder are not touched."""

    folder: Path
    prefix: str
    bucket_bytes: int
    name: ClassVar[str] = "disk"

    def packer(self) -> DiskPacker:
        return DiskPacker(self.folder, self.prefix, self.bucket_bytes)

    def receiver(self, rank: int, size: int) -> DiskReceiver:
        return DiskReceiver()


def write_weights(file: Path, content: bytes) -> None:
    """Write a file of weights. Raises SyncError if the disk is full or not writable."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # The file is not synced, because a power cut would end sender and receivers alike.
        write_atomically(file, content, sync=False)
    except OSError as error:
        raise SyncError(
            f"weights cannot be written to {file.parent}: {error.strerror}. Free some space, or "
            "set sync.transport.folder to another disk, or sync.transport.type to shared_memory."
        ) from None
