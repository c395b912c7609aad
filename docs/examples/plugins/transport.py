"""A transport: it sends weights through compressed files, for a slow disk."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from homeostat import plugins
from homeostat.sync.bucket import Bucket
from homeostat.sync.disk import DiskPacker, write_weights
from homeostat.sync.layout import Named, entries_of, fill, flat_bytes, verified, views
from homeostat.sync.transports import TransportSite


class Zipped(plugins.Transport):
    """Send weights through files that zlib compresses."""

    level: int = plugins.key(1, ge=0, le=9, resume="free", help="Compression level of zlib.")

    def open(self, site: TransportSite) -> "ZippedTransport":
        return ZippedTransport(site.folder, site.prefix, self.bucket_bytes, self.level)


@dataclass(frozen=True)
class ZippedTransport:
    """Makes the sender and the receiver; it is sent to the trainer's ranks and to the engine."""

    folder: Path
    prefix: str
    bucket_bytes: int
    level: int
    name: ClassVar[str] = "zipped"

    def packer(self) -> "ZippedPacker":
        return ZippedPacker(self.folder, self.prefix, self.bucket_bytes, self.level)

    def receiver(self, rank: int, size: int) -> "ZippedReceiver":
        return ZippedReceiver()


@dataclass(frozen=True, slots=True)
class ZippedBucket(Bucket):
    file: Path


class ZippedPacker(DiskPacker):
    """The sender: one file for each bucket, in a folder for each publication."""

    def __init__(self, folder: Path, prefix: str, bucket_bytes: int, level: int) -> None:
        super().__init__(folder, prefix, bucket_bytes)
        self.level = level

    def _bucket(self, path: Path, named: Named) -> Bucket:
        entries = entries_of(named)
        flat = torch.zeros(flat_bytes(entries), dtype=torch.uint8)
        fill(flat, named)
        file = path.with_suffix(".zlib")
        write_weights(file, zlib.compress(flat.numpy().tobytes(), self.level))
        return ZippedBucket(entries, flat_bytes(entries), file)


class ZippedReceiver:
    """The receiver in the engine. `verified` compares every tensor with the sender's checksum."""

    def unpack(self, bucket: ZippedBucket) -> Iterator[tuple[str, Tensor]]:
        content = bytearray(zlib.decompress(bucket.file.read_bytes()))
        flat = torch.frombuffer(content, dtype=torch.uint8)
        yield from verified(bucket, views(flat, bucket.entries), transport="zipped")

    def close(self) -> None:
        pass
