"""Buckets of weights, and the protocols of those who send and receive them.

    (name, tensor) ... -> Packer.pack -> Bucket ... -> Receiver.unpack -> (name, tensor) ...

A bucket is small and picklable: it says which tensors it holds and where their bytes are, not the
bytes. It travels to the engine by whatever calls the engine is driven with; the bytes travel by the
transport. tests/contract holds every transport to this.

Invariants: tensors arrive under their names, in order, bit for bit; a bucket takes at most
`bucket_bytes`, unless it is a single tensor; its bytes stay valid until the next bucket is asked
for, so that memory is bounded by the bucket and not by the model. Every wait has a deadline.
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
    """A tensor under its canonical HF name, and the checksum of what the sender has."""

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
    """Some tensors. Each transport has a subclass that says where their bytes are; `num_bytes` is
    what they take there."""

    entries: tuple[TensorEntry, ...]
    num_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that travel to a receiver, where these are fewer than the tensors have."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def whole_because(self) -> str:
        """Why a transport that sends differences sent whole tensors; empty if it did not."""
        return ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One publication. `checksum` is over all tensors, which have `num_bytes`; `sent_bytes` of them
    travelled. `seconds` is without the quiescing, and without the `staged_seconds` for which they
    were sent while the engine sampled; None if they were not."""

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
    """The sender's half. Picklable until first used, so that it can travel to the trainer."""

    def pack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]: ...

    def close(self) -> None:
        """Give back what it holds. Idempotent."""
        ...


class Receiver(Protocol):
    """The engine's half, one in each of its processes."""

    def unpack(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """The bucket's tensors, each one verified before the first is given out.

        They are views of the bucket's bytes: what is kept must be copied before the next bucket.
        """
        ...

    def close(self) -> None:
        """Give back what it holds. Idempotent."""
        ...


class Transport(Protocol):
    """A picklable description, of which both halves are made. It serves one packer."""

    name: ClassVar[str]

    def packer(self) -> Packer: ...

    def receiver(self, rank: int, size: int) -> Receiver:
        """Make the half of process `rank` of the `size` that the engine has."""
        ...
