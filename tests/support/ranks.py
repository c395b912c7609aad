"""The processes of trainer ranks, as the operating system knows them; and runs over ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support import forks
from tests.support.kills import children_of

from homeostat.workers import launchers
from homeostat.workers.child import Ticket
from homeostat.workers.opening import LAUNCHERS
from homeostat.workers.processes import open_processes

# The guardians of the trainer that was forked last, by rank.
FORKED: list[forks.Forked] = []
CHILD, TORCHRUN = "homeostat.workers.child", "torch.distributed.run"


def over(num_ranks: int, **backend: str | int) -> tuple[str, ...]:
    """Overrides that spread the trainer over so many ranks."""
    keys = ", ".join(f"{name}: {value}" for name, value in {"type": "fsdp", **backend}.items())
    cluster = f"cluster={{type: torchrun, processes: {num_ranks}, timeout_s: 120}}"
    return (cluster, f"trainer.backend={{{keys}}}")


@contextmanager
def forked() -> Iterator[None]:
    """Ranks are forked, and not started by torchrun: each process would import torch for seconds.

    They have the environment that torchrun gives them. `forked_pids` finds them, `rank_pids` not.
    """
    with patch.dict(LAUNCHERS, {"torchrun": partial(open_processes, launch=_fork)}):
        yield


def _fork(ticket: Ticket, *, env: Mapping[str, str], folder: Path) -> list[Any]:
    world = launchers._rendezvous(ticket)
    FORKED[:] = [
        launchers._start(
            launchers.CHILD,
            replace(ticket, rank=rank),
            env={"RANK": str(rank), "LOCAL_RANK": str(rank), **world, **env},
        )
        for rank in range(ticket.size)
    ]
    return list(FORKED)


def forked_pids() -> list[int]:
    """Return the processes that compute, by rank, of the trainer that was forked last."""
    return [children_of(guardian.pid)[0] for guardian in FORKED]


def rank_pids(controller: int) -> dict[int, int]:
    """Rank -> the process that computes. Its parent, the guardian, is of the same program."""
    found = {}
    for pid in descendants(controller):
        if _is_child(pid) and _is_child(_parent(pid)):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            (rank,) = [v[len(b"RANK=") :] for v in variables if v.startswith(b"RANK=")]
            found[int(rank)] = pid
    return dict(sorted(found.items()))


def descendants(pid: int) -> set[int]:
    """All processes that this one started or had forked, and those that they did."""
    parents = {int(p.name): _parent(int(p.name)) for p in Path("/proc").glob("[0-9]*")}
    found: set[int] = set()
    # The servers of forks are children of another process, and stay for the tests to come.
    layer = {pid, *forks.SERVERS} if pid == os.getpid() else {pid}
    while layer:
        layer = {child for child, parent in parents.items() if parent in layer}
        found |= layer
    return found


def all_gone(pids: set[int], *, timeout_s: float = 20.0) -> bool:
    """Return whether these processes end within that time."""
    end = time.monotonic() + timeout_s
    while any(map(_is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(_is_alive, pids))


def address_space(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


def _is_child(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return CHILD in command and TORCHRUN not in command


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else -1


def _is_alive(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z"


def _stat(pid: int) -> list[str]:
    """State, parent ...: what follows the name, which may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
