"""Weights by broadcast: one sender and the engine's processes in a separate group.

The group uses gloo on the CPU and NCCL on GPUs. It is independent of torch.distributed's default
group, which trainer and engine may each have. Its members find each other in a folder, or across
hosts at a port of the sender's (meeting.py). A meeting serves one group: after a failure, open a
new transport.

The broadcast runs in a thread of the sender while the bucket is being sent to the receivers, which
take part in it when they unpack. It does not matter which side starts first.
"""

from __future__ import annotations

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
from homeostat.sync.meeting import SENDER, FolderMeeting, Meeting, StoreMeeting, own_host

_POLL_S = 0.01
_DEATH_S = 2.0


@dataclass(frozen=True, slots=True)
class CollectiveBucket(Bucket):
    """A bucket whose bytes are sent by broadcast; `address` is where its group meets."""

    address: str = ""


@dataclass(frozen=True)
class CollectiveTransport:
    """`folder` is where the group meets, unless it is `over_hosts`; receivers are ranks 1 to
    `num_receivers` of it. gloo's connections are bound to the address `host`, or to that of the
    host that a process is on."""

    folder: Path
    bucket_bytes: int
    num_receivers: int
    device: torch.device
    timeout_s: float
    host: str
    over_hosts: bool = False
    name: ClassVar[str] = "collective"

    def packer(self) -> CollectivePacker:
        return CollectivePacker(Group(self, SENDER), self.bucket_bytes)

    def receiver(self, rank: int, size: int) -> CollectiveReceiver:
        if size != self.num_receivers:
            raise SyncError(
                f"the engine has {size} processes, and the group was opened for "
                f"{self.num_receivers}: they would wait for each other forever."
            )
        return CollectiveReceiver(Group(self, rank + 1))

    def meeting(self, rank: int) -> Meeting:
        """Return the part of one member in the meeting."""
        if self.over_hosts:
            return StoreMeeting(self.host, rank, timeout_s=self.timeout_s)
        return FolderMeeting(self.folder, rank)


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
            address = self.group.come()
            self._sending = _Sending(partial(self.group.broadcast, flat))
            yield CollectiveBucket(entries, num_bytes, address)
            self._sending.finish()
            self._sending = None

    def close(self) -> None:
        self.group.close()


class CollectiveReceiver:
    def __init__(self, group: Group) -> None:
        self.group = group

    def unpack(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(bucket, CollectiveBucket), bucket
        flat = self.group.buffer(bucket.num_bytes)
        self.group.broadcast(flat, bucket.address)
        yield from verified(bucket, views(flat, bucket.entries), transport=CollectiveTransport.name)

    def close(self) -> None:
        self.group.close()


class Group:
    """One member of the group; it joins when it first takes part."""

    def __init__(self, transport: CollectiveTransport, rank: int) -> None:
        self.transport = transport
        self.rank = rank
        self._meeting: Meeting | None = None
        self._backend: Any = None
        self._flat: Tensor | None = None
        self._num_calls = 0

    def buffer(self, num_bytes: int) -> Tensor:
        """Return the same memory each time; it has the largest size that was needed so far."""
        if self._flat is None or len(self._flat) < num_bytes:
            # The transport's device is the sender's; the receiver's is the current one of its kind.
            own = self.transport.device
            device = own if self.rank == SENDER else torch.device(own.type)
            self._flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._flat[:num_bytes]

    def come(self, address: str = "") -> str:
        """Come to the meeting at `address`, and return its address. Idempotent."""
        if self._meeting is None:
            meeting = self.transport.meeting(self.rank)
            try:
                meeting.join(address)
            except SyncError as error:
                title = _title(self.rank, self.transport.num_receivers)
                raise SyncError(f"{title} {error}") from None
            self._meeting = meeting
        return self._meeting.address

    def broadcast(self, flat: Tensor, address: str = "") -> None:
        """Send bytes from the sender to all members. Raises SyncError if one is missing at the
        deadline.
        """
        self.come(address)
        assert self._meeting is not None
        if self._backend is None:
            self._backend = self._joined(self._meeting)
        self._num_calls += 1
        self._meeting.tell(self._num_calls)
        options = dist.BroadcastOptions()
        options.rootRank = SENDER
        try:
            if flat.device.type == "cuda":
                torch.cuda.synchronize(flat.device)
            # With a timeout, it is the host that waits, not only the stream.
            timeout = timedelta(seconds=self.transport.timeout_s)
            self._backend.broadcast([flat], options).wait(timeout)
        except RuntimeError as error:
            # Closing the connections makes the other members notice at once, not at their deadline.
            self._leave()
            raise self._broken(error) from None
        # A small broadcast returns once the system has buffered it, even if no member ever reads
        # it.
        if self.rank == SENDER and (missing := self._missing()):
            raise self._failure(missing, "the process has ended")

    def close(self) -> None:
        self._leave()
        self._flat = None
        if self._meeting is not None:
            self._meeting.leave()
            if self.rank == SENDER:
                self._meeting.end()
            self._meeting = None

    def _leave(self) -> None:
        if self._backend is not None and self.transport.device.type == "cuda":
            self._backend.abort()
        self._backend = None

    def _joined(self, meeting: Meeting) -> Any:
        """Wait until all are there, and return the process group."""
        deadline = time.monotonic() + self.transport.timeout_s
        while missing := self._missing():
            if time.monotonic() > deadline:
                raise self._failure(missing, f"waited {self.transport.timeout_s:g} s")
            time.sleep(_POLL_S)
        try:
            return _backend(self.transport, self.rank, meeting)
        except RuntimeError as error:
            raise self._broken(error) from None

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.transport.num_receivers + 1) if rank != self.rank]

    def _missing(self) -> list[int]:
        meeting = self._meeting
        return [rank for rank in self._others if meeting is None or not meeting.is_there(rank)]

    def _late(self) -> list[int]:
        """Return the living members that have not reached the broadcast of this member."""
        meeting = self._meeting
        assert meeting is not None, "the member has come"
        return [rank for rank in self._others if meeting.num_calls(rank) < self._num_calls]

    def _broken(self, error: RuntimeError) -> SyncError:
        # A dying process may close its connections before it releases its file.
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


def _backend(transport: CollectiveTransport, rank: int, meeting: Meeting) -> Any:
    """A ProcessGroupNCCL or ProcessGroupGloo: torch's stubs leave out most of what both have."""
    size = transport.num_receivers + 1
    store = meeting.store(size)
    timeout = timedelta(seconds=transport.timeout_s)
    if transport.device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        # Past this, NCCL's watchdog ends the process: ours must be the first to give up.
        options._timeout = 2 * timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    # pyrefly: ignore[missing-attribute]
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host(transport.host))]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _title(rank: int, num_receivers: int) -> str:
    return "the sender" if rank == SENDER else f"receiver {rank - 1} of {num_receivers}"
