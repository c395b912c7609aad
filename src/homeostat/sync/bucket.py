"""Buckets of weights, and the protocols of their senders and receivers.

    (name, tensor) ... -> Packer.pack -> Bucket ... -> Receiver.unpack -> (name, tensor) ...

A bucket is small and picklable: it describes its tensors and where their bytes are, but does not
contain the bytes. It is an argument of the calls to the engine; the transport moves the bytes.
tests/contract tests every transport against this protocol.

Invariants: tensors arrive with their names, in order and bitwise equal. A bucket has at most
`bucket_bytes`, unless it is a single tensor. Its bytes stay valid until the next bucket is
requested, so memory is bounded by the bucket size and not by the model. Every wait has a deadline.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from homeostat.types import POLICY_ID


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor under its canonical HF name, and the checksum of the sender's tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def describe(self) -> str:
        return f"{self.name!r} ({str(self.dtype).removeprefix('torch.')} {list(self.shape)})"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A set of tensors. Each transport has a subclass that describes where their bytes are.
    `num_bytes` is their size there.
    """

    entries: tuple[TensorEntry, ...]
    num_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that are sent to a receiver, if they are fewer than the tensors have."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def whole_because(self) -> str:
        """The reason why a transport that normally sends differences sent whole tensors; else
        empty.
        """
        return ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One publication. `checksum` covers all tensors, whose size is `num_bytes`; `sent_bytes` were
    sent. `seconds` excludes quiescing and `staged_seconds`, the time during which weights were sent
    while the engine sampled (None if they were not).
    """

    policy_id: str
    version: int
    base_version: int
    transport: str
    checksum: str
    num_tensors: int
    num_bytes: int
    seconds: float
    sent_bytes: int = 0
    whole_because: str = ""
    staged_seconds: float | None = None


def entries_checksum(entries: Iterable[TensorEntry], *, policy_id: str = POLICY_ID) -> str:
    """Checksum of the policy's id and the tensors' names, dtypes, shapes and checksums, in order.

    Sender and engine must agree on it.
    """
    digest = hashlib.blake2b(f"{policy_id!r}\n".encode(), digest_size=16)
    for entry in entries:
        line = (entry.name, str(entry.dtype), list(entry.shape), entry.checksum)
        digest.update(f"{line!r}\n".encode())
    return digest.hexdigest()


class Packer(Protocol):
    """The sender's half. It can be pickled until its first use, so that it can be passed to the
    trainer.
    """

    def pack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]: ...

    def close(self) -> None:
        """Release all resources. Idempotent."""
        ...


class Receiver(Protocol):
    """The engine's half. Each process of the engine has one."""

    def unpack(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """Return the bucket's tensors. All are verified before the first is returned.

        They are views of the bucket's bytes: copy what you keep before the next bucket.
        """
        ...

    def close(self) -> None:
        """Release all resources. Idempotent."""
        ...


class Transport(Protocol):
    """A picklable description from which both halves are created. It serves one packer."""

    name: ClassVar[str]

    def packer(self) -> Packer: ...

    def receiver(self, rank: int, size: int) -> Receiver:
        """Create the receiver of process `rank` of an engine that has `size` processes."""
        ...
