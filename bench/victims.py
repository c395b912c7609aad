"""The processes of a run, found by /proc, and how they are killed. Linux only.

main          `homeostat train`, the leader of a session of its own
engine        guardian (a child of main) and worker (a child of the guardian)
helper        the same, for an engine that samples beside the trainer's
reward        guardian and worker of one reward worker
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

MARK = "HOMEOSTAT_KILLS_MARK"


@dataclass(frozen=True, slots=True)
class Pair:
    """A guardian and its worker, where it has started one."""

    guardian: int
    worker: int | None

    def kill(self, rng: random.Random) -> str:
        """Kill one of the two, or both. Returns which."""
        part = rng.choice(("worker", "worker", "guardian", "both"))
        pids = {"worker": [self.worker], "guardian": [self.guardian]}
        for pid in pids.get(part, [self.guardian, self.worker]):
            kill(self.guardian if pid is None else pid)
        return part


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def pairs(main: int, kind: str) -> list[Pair]:
    """The processes of one kind that a run has at this moment."""
    found = []
    for child in _children(main):
        if _kind(child) == kind:
            workers = _children(child)
            found.append(Pair(child, workers[0] if workers else None))
    return found


def marked(mark: str) -> list[int]:
    """Processes that began with this mark in their environment, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def worker_pids(mark: str, group_name: str) -> list[tuple[int, int]]:
    """Guardian and worker of every rank of a group, whatever launched it, by the run's mark."""
    found = []
    for guardian in marked(mark):
        if _kind(guardian) == group_name and _kind(_parent(guardian)) != group_name:
            found += [(guardian, worker) for worker in _children(guardian)]
    return found


def orphans(mark: str, *, patience_s: float) -> list[int]:
    """Return what is left of a run after a while."""
    end = time.monotonic() + patience_s
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(word) for word in file.read_text().split()]
    return found


def _kind(pid: int) -> str | None:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"homeostat.rewards.worker" in command:
            return "reward"
        if b"homeostat.workers.child" not in command:
            return None
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"HOMEOSTAT_WORKER="):
                name = json.loads(entry.partition(b"=")[2])["group_name"]
                return "helper" if name.startswith("helper") else name
    except OSError:
        pass  # it ended while it was looked at
    return None
