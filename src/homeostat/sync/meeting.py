"""Meeting places of the members of a broadcast, where they also report their progress.

    FolderMeeting   processes of one host: each holds a file while it lives, so that who never came,
                    and who died, can be said by name, and no port has to be free
    StoreMeeting    processes of several hosts: a key-value store that the sender opens at a free
                    port of its host; its address travels with the buckets

Each member records the number of its current broadcast. If a broadcast fails, the error can name
the members that did not take part.
"""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from homeostat.errors import SyncError
from homeostat.sync.presence import hold, is_held

SENDER = 0
# Prefix of the names of meeting places.
PREFIX = "collective-"
# The address of a process's host, if a launcher over several hosts provides it.
HOST_VARIABLE = "HOMEOSTAT_HOST"


class Meeting(Protocol):
    """The part of one member. Others find it by `address`, which is empty if they need none."""

    address: str

    def join(self, address: str) -> None:
        """Join the meeting. Raises SyncError if the place is taken or cannot be reached."""
        ...

    def is_there(self, rank: int) -> bool: ...

    def tell(self, num_calls: int) -> None:
        """Record the number of this member's current broadcast."""
        ...

    def num_calls(self, rank: int) -> int: ...

    def store(self, size: int) -> Any:
        """Return the store by which torch's process group finds its members."""
        ...

    def leave(self) -> None: ...

    def end(self) -> None:
        """Remove the place. Called by the sender, after it has left."""
        ...


class FolderMeeting:
    """A folder that all members see, on one host."""

    address = ""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self._descriptor: int | None = None

    def join(self, address: str) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._descriptor or hold(self._place(self.rank))
        except OSError as error:
            raise SyncError(
                f"cannot take its place in {self.folder}: {error.strerror}. Is it taken already, "
                "or the disk full?"
            ) from None
        if self.rank == SENDER:
            _remove_stale(self.folder)

    def is_there(self, rank: int) -> bool:
        return is_held(self._place(rank))

    def tell(self, num_calls: int) -> None:
        assert self._descriptor is not None, "who joined holds its place"
        os.pwrite(self._descriptor, f"{num_calls:>12}".encode(), 0)

    def num_calls(self, rank: int) -> int:
        try:
            return int(self._place(rank).read_text() or 0)
        except (OSError, ValueError):
            return 0

    def store(self, size: int) -> Any:
        return dist.FileStore(str(self.folder / "store"), size)

    def leave(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def end(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _place(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}"


class StoreMeeting:
    """A TCP store at the sender's host. The death of a member is noticed only because it stops
    reporting.
    """

    def __init__(self, host: str, rank: int, *, timeout_s: float) -> None:
        self.rank = rank
        self.timeout = timedelta(seconds=timeout_s)
        self.address = ""
        self._store: Any = None
        if rank == SENDER:
            self._host = own_host(host)

    def join(self, address: str) -> None:
        if self._store is not None:
            return
        try:
            if self.rank == SENDER:
                self._store = self._open(self._host, 0, is_master=True)
                self.address = f"{self._host}:{self._store.port}"
            else:
                host, _, port = address.rpartition(":")
                self._store = self._open(host, int(port), is_master=False)
        except (RuntimeError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise SyncError(
                f"cannot meet the sender at {address or self._host}: {reason}. Can this host reach "
                "it, and is no firewall in between?"
            ) from None
        # pyrefly: ignore[missing-attribute] it is open here
        self._store.set(f"there {self.rank}", "1")

    def is_there(self, rank: int) -> bool:
        return self._store is not None and self._store.check([f"there {rank}"])

    def tell(self, num_calls: int) -> None:
        self._store.set(f"calls {self.rank}", str(num_calls))

    def num_calls(self, rank: int) -> int:
        key = f"calls {rank}"
        if self._store is None or not self._store.check([key]):
            return 0
        return int(self._store.get(key))

    def store(self, size: int) -> Any:
        return PrefixStore("group", self._store)

    def leave(self) -> None:
        self._store = None

    def end(self) -> None:
        """The store ends with the sender's."""

    def _open(self, host: str, port: int, *, is_master: bool) -> Any:
        return dist.TCPStore(
            host, port, is_master=is_master, timeout=self.timeout, wait_for_workers=False
        )


def own_host(default: str) -> str:
    """Return the address of this process's host, at which others reach it."""
    return os.environ.get(HOST_VARIABLE, default)


def _remove_stale(folder: Path) -> None:
    """Remove meeting places in the same folder whose sender was killed."""
    for place in folder.parent.glob(f"{PREFIX}*/rank_{SENDER}"):
        if not is_held(place):
            shutil.rmtree(place.parent, ignore_errors=True)
