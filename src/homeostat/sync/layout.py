"""The layout of a bucket: tensors packed into one flat tensor of bytes, and taken apart again.

Each tensor begins at a multiple of 16 bytes, so that it can be viewed in its own dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from torch import Tensor

from homeostat.errors import SyncError
from homeostat.sync.bucket import Bucket, TensorEntry
from homeostat.sync.checksum import bytes_of, tensor_checksums

_ALIGNMENT = 16

Named = list[tuple[str, Tensor]]


def grouped(weights: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[Named]:
    """Group the weights, in order, in buckets of at most `bucket_bytes` or one larger tensor."""
    named: Named = []
    used = 0
    for name, tensor in weights:
        size = _padded(tensor.nbytes)
        if named and used + size > bucket_bytes:
            yield named
            named, used = [], 0
        named.append((name, tensor))
        used += size
    if named:
        yield named


def entries_of(named: Named) -> tuple[TensorEntry, ...]:
    sums = tensor_checksums([tensor for _, tensor in named])
    return tuple(
        TensorEntry(name, tensor.dtype, tuple(tensor.shape), checksum)
        for (name, tensor), checksum in zip(named, sums, strict=True)
    )


def flat_bytes(entries: Iterable[TensorEntry]) -> int:
    return sum(_padded(entry.num_bytes) for entry in entries)


def fill(flat: Tensor, named: Named) -> None:
    at = 0
    for _, tensor in named:
        flat[at : at + tensor.nbytes].copy_(bytes_of(tensor))
        at += _padded(tensor.nbytes)


def views(flat: Tensor, entries: Sequence[TensorEntry]) -> list[Tensor]:
    starts = accumulate((_padded(entry.num_bytes) for entry in entries), initial=0)
    return [
        flat[at : at + entry.num_bytes].view(entry.dtype).view(entry.shape)
        for at, entry in zip(starts, entries, strict=False)
    ]


def verified(
    bucket: Bucket, tensors: Sequence[Tensor], *, transport: str
) -> list[tuple[str, Tensor]]:
    """Return the tensors by name. Raises SyncError unless all equal the sender's."""
    for entry, tensor in zip(bucket.entries, tensors, strict=True):
        if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
            raise SyncError(
                f"{entry.describe()} arrived by {transport} as {tensor.dtype} "
                f"{list(tensor.shape)}: the engine must not serve it."
            )
    found = tensor_checksums(tensors)
    for entry, checksum in zip(bucket.entries, found, strict=True):
        if checksum != entry.checksum:
            raise SyncError(
                f"{entry.describe()} was altered on its way by {transport}: its checksum is "
                f"{checksum:016x}, and {entry.checksum:016x} was sent. The engine must not serve "
                "it. Publish again; if it comes back, suspect memory or disk, or set another "
                "sync.transport."
            )
    return [(entry.name, tensor) for entry, tensor in zip(bucket.entries, tensors, strict=True)]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
