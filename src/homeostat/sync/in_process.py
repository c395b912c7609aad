"""The transport for an engine that computes with the trainer's own tensors: nothing is sent.

A bucket holds all tensors themselves, because nothing is copied. The receiver only verifies that
the engine's tensors are the same memory; then no byte can differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from torch import Tensor

from homeostat.errors import SyncError
from homeostat.sync.bucket import Bucket
from homeostat.sync.layout import entries_of


@dataclass(frozen=True, slots=True)
class InProcessBucket(Bucket):
    tensors: tuple[Tensor, ...]

    def __reduce__(self) -> NoReturn:
        raise SyncError(
            "sync.transport.type is in_process, but the engine is in another process, where the "
            "trainer's tensors do not exist. Set it to shared_memory, or leave sync.transport out."
        )


class InProcessPacker:
    def pack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        named = list(weights)
        tensors = tuple(tensor for _, tensor in named)
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        yield InProcessBucket(entries_of(named), num_bytes, tensors)

    def close(self) -> None:
        """Do nothing: it has no resources to release."""


class InProcessReceiver:
    def __init__(self, own: Mapping[str, Tensor]) -> None:
        self.own = own

    def unpack(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(bucket, InProcessBucket), bucket
        for entry, tensor in zip(bucket.entries, bucket.tensors, strict=True):
            own = self.own.get(entry.name)
            if own is None or not _same_memory(own, tensor):
                have = "has no such tensor" if own is None else "has it in other memory"
                raise SyncError(
                    f"{entry.describe()} is not shared: the engine {have}, and in_process copies "
                    "nothing. Set sync.transport.type to shared_memory, or leave sync.transport "
                    "out."
                )
            yield entry.name, own

    def close(self) -> None:
        """Do nothing: it has no resources to release."""


@dataclass(frozen=True)
class InProcessTransport:
    """`own` maps the names that the trainer uses to the engine's tensors."""

    own: Mapping[str, Tensor]
    name: ClassVar[str] = "in_process"

    def packer(self) -> InProcessPacker:
        return InProcessPacker()

    def receiver(self, rank: int, size: int) -> InProcessReceiver:
        return InProcessReceiver(self.own)


def _same_memory(own: Tensor, sent: Tensor) -> bool:
    return (own.data_ptr(), own.dtype, own.shape, own.stride(), own.device) == (
        (sent.data_ptr(), sent.dtype, sent.shape, sent.stride(), sent.device)
    )
