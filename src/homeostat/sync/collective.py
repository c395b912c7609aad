"""Weights by broadcast: one sender and the engine's processes in a separate group.

The group is gloo on the CPU and NCCL on GPUs, and knows nothing of torch.distributed's default
group, which trainer and engine may each have for themselves. Its members meet in a folder: each
holds a file there while it lives, so that who never came, and who died, can be said by name, and no
port has to be free. A folder is for one group: after a failure, open a new transport.

The broadcast runs in a thread of the sender while the bucket is being sent to the receivers, which
take part in it when they unpack. It does not matter which side starts first.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributed as dist

from homeostat.errors import SyncError
from homeostat.sync.bucket import Bucket
from homeostat.sync.layout import entries_of, fill, flat_bytes, grouped, verified, views
from homeostat.sync.presence import hold, is_held

# Of the names of meeting places.
PREFIX = "collective-"
_SENDER = 0
_POLL_S = 0.01
_DEATH_S = 2.0


@dataclass(frozen=True, slots=True)
class CollectiveBucket(Bucket):
    """Its bytes are wherever the broadcast is."""


@dataclass(frozen=True)
class CollectiveTransport:
    """`folder` is where the group meets; receivers are ranks 1 to `num_receivers` of it. gloo's
    connections are bound to the address `host`."""

    folder: Path
    bucket_bytes: int
    num_receivers: int
    device: torch.device
    timeout_s: float
    host: str
    name: ClassVar[str] = "collective"

    def packer(self) -> CollectivePacker:
        return CollectivePacker(Group(self, _SENDER), self.bucket_bytes)

    def receiver(self, rank: int, size: int) -> CollectiveReceiver:
        if size != self.num_receivers:
            raise SyncError(
                f"the engine has {size} processes, and the group was opened for "
                f"{self.num_receivers}: they would wait for each other forever."
            )
        return CollectiveReceiver(Group(self, rank + 1))


class CollectivePacker:
    def __init__(self, group: Group, bucket_bytes: int) -> None:
        self.group = group
        self.bucket_bytes = bucket_bytes
        self._sending: _Sending | None = None

    def pack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        for named in grouped(weights, bucket_bytes=self.bucket_bytes):
            if self._sending is not None:
                raise SyncError(
                    "the broadcast before this one was given up: its group cannot be used again. "
                    "Close the engine, and open a new transport."
                )
            entries = entries_of(named)
            num_bytes = flat_bytes(entries)
            flat = self.group.buffer(num_bytes)
            fill(flat, named)
            self._sending = _Sending(partial(self.group.broadcast, flat))
            yield CollectiveBucket(entries, num_bytes)
            self._sending.finish()
            self._sending = None

    def close(self) -> None:
        self.group.close()
        shutil.rmtree(self.group.transport.folder, ignore_errors=True)


class CollectiveReceiver:
    def __init__(self, group: Group) -> None:
        self.group = group

    def unpack(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        flat = self.group.buffer(bucket.num_bytes)
        self.group.broadcast(flat)
        yield from verified(bucket, views(flat, bucket.entries), transport=CollectiveTransport.name)

    def close(self) -> None:
        self.group.close()


class Group:
    """One member of the group; it joins when it first takes part."""

    def __init__(self, transport: CollectiveTransport, rank: int) -> None:
        self.transport = transport
        self.rank = rank
        self._descriptor: int | None = None
        self._backend: Any = None
        self._flat: Tensor | None = None
        # Written to this member's place, so that the others can say who did not take part.
        self._num_calls = 0

    def buffer(self, num_bytes: int) -> Tensor:
        """The same memory each time, as large as was ever needed."""
        if self._flat is None or len(self._flat) < num_bytes:
            # The transport's device is the sender's; the receiver's is the current one of its kind.
            own = self.transport.device
            device = own if self.rank == _SENDER else torch.device(own.type)
            self._flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._flat[:num_bytes]

    def broadcast(self, flat: Tensor) -> None:
        """Send bytes from the sender to all. Raises SyncError if one is missing by the deadline."""
        if self._backend is None:
            self._backend = self._join()
        self._num_calls += 1
        assert self._descriptor is not None, "who joins holds its place"
        os.pwrite(self._descriptor, f"{self._num_calls:>12}".encode(), 0)
        options = dist.BroadcastOptions()
        options.rootRank = _SENDER
        try:
            if flat.device.type == "cuda":
                torch.cuda.synchronize(flat.device)
            # With a timeout, it is the host that waits, not only the stream.
            timeout = timedelta(seconds=self.transport.timeout_s)
            self._backend.broadcast([flat], options).wait(timeout)
        except RuntimeError as error:
            # Without its connections the other members notice at once, not at their deadline.
            self._leave()
            raise self._broken(error) from None
        # A small broadcast ends once the system has it, whether or not it is ever read.
        if self.rank == _SENDER and (missing := self._missing()):
            raise self._failure(missing, "the process has ended")

    def close(self) -> None:
        self._leave()
        self._flat = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _leave(self) -> None:
        if self._backend is not None and self.transport.device.type == "cuda":
            self._backend.abort()
        self._backend = None

    def _join(self) -> Any:
        transport = self.transport
        try:
            transport.folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._descriptor or hold(self._place(self.rank))
        except OSError as error:
            raise SyncError(
                f"{_title(self.rank, transport.num_receivers)} cannot take its place in "
                f"{transport.folder}: {error.strerror}. Is it taken already, or the disk full?"
            ) from None
        if self.rank == _SENDER:
            _remove_stale(transport.folder)
        deadline = time.monotonic() + transport.timeout_s
        while missing := self._missing():
            if time.monotonic() > deadline:
                raise self._failure(missing, f"waited {transport.timeout_s:g} s")
            time.sleep(_POLL_S)
        try:
            return _backend(transport, self.rank)
        except RuntimeError as error:
            raise self._broken(error) from None

    def _missing(self) -> list[int]:
        others = (rank for rank in range(self.transport.num_receivers + 1) if rank != self.rank)
        return [rank for rank in others if not is_held(self._place(rank))]

    def _place(self, rank: int) -> Path:
        return self.transport.folder / f"rank_{rank}"

    def _broken(self, error: RuntimeError) -> SyncError:
        # A process that dies may let go of its connections before it lets go of its file.
        deadline = time.monotonic() + _DEATH_S
        while not (missing := self._missing()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self._failure(missing, str(error).partition(". ")[0])

    def _failure(self, missing: list[int], why: str) -> SyncError:
        size = self.transport.num_receivers
        who = "missing: " + ", ".join(_title(rank, size) for rank in missing)
        if not missing:
            late = [_title(rank, size) for rank in self._late()]
            who = f"all processes live, and {', '.join(late) or 'nobody'} did not take part"
        return SyncError(
            f"the weights' broadcast failed at {_title(self.rank, size)}: {who} ({why}). Look at "
            "the engine's log; sync.timeout_s is how long it may take."
        )

    def _late(self) -> list[int]:
        """Members that live, and have not come to the broadcast that this one is at."""
        others = (rank for rank in range(self.transport.num_receivers + 1) if rank != self.rank)
        return [rank for rank in others if _num_calls(self._place(rank)) < self._num_calls]


class _Sending:
    """A call in a separate thread, which does not keep the process from ending."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._error: SyncError | None = None
        self._is_sent = False
        self._thread = threading.Thread(target=self._run, name="weights-broadcast", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
            self._is_sent = True
        except SyncError as error:
            self._error = error

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._is_sent, "the broadcast ended by an error that is no SyncError"


def _backend(transport: CollectiveTransport, rank: int) -> Any:
    """A ProcessGroupNCCL or ProcessGroupGloo: torch's stubs leave out most of what both have."""
    size = transport.num_receivers + 1
    store = dist.FileStore(str(transport.folder / "store"), size)  # pyright: ignore
    timeout = timedelta(seconds=transport.timeout_s)
    if transport.device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        # Past this, NCCL's watchdog ends the process: ours must be the first to give up.
        options._timeout = 2 * timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=transport.host)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _num_calls(place: Path) -> int:
    try:
        return int(place.read_text() or 0)
    except (OSError, ValueError):
        return 0


def _remove_stale(folder: Path) -> None:
    """Meeting places beside this one whose sender was killed."""
    for place in folder.parent.glob(f"{PREFIX}*/rank_{_SENDER}"):
        if not is_held(place):
            shutil.rmtree(place.parent, ignore_errors=True)


def _title(rank: int, num_receivers: int) -> str:
    return "the sender" if rank == _SENDER else f"receiver {rank - 1} of {num_receivers}"
