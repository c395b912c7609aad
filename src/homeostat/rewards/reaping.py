"""End everything that a reward started, even a child that was forked twice into its own session.

There are two mechanisms on Linux:

    subreaper   the guardian adopts orphans below it, so it finds them among its descendants
    marker      every process below a worker has the worker's marker in its environment, so they
                are found even if the guardian was killed with its group

Both read /proc, on any architecture. A process is ended only if it descends from the guardian or
carries the marker, which is new for every worker, so no other run's process can be hit. Without
/proc (macOS) only the worker's process group is ended. Stdlib only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

MARKER = "HOMEOSTAT_REWARD_WORKER"
# A process may fork during the search, so repeat it until none is left, for at most this long.
END_SECONDS = 2.0
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it."""
    if sys.platform == "linux":
        # If the kernel does not support it, the other mechanism remains.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(root: int) -> None:
    """Kill every process below `root`."""
    _end_all(lambda: _descendants(root))


def end_marked(marker: str) -> None:
    """Kill every process with the marker in its environment, except this one."""
    wanted = f"{MARKER}={marker}".encode()
    _end_all(lambda: [pid for pid in _processes() if wanted in _environment(pid)])


def has_stopped_child(root: int) -> bool:
    """Return whether a child of `root` was stopped by a signal. Without /proc that is unknown."""
    return any(_state_and_parent(pid) == (b"T", root) for pid in _processes())


def _end_all(find: Callable[[], Iterable[int]]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while found := [pid for pid in find() if pid != os.getpid()]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # Not before the first kill: on a busy machine a single search may take that long.
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _descendants(root: int) -> list[int]:
    parents = {pid: parent for pid in _processes() if (parent := _parent(pid)) is not None}
    found, above = [], {root}
    while above := {pid for pid, parent in parents.items() if parent in above}:
        found += sorted(above)
    return found


def _processes() -> Iterator[int]:
    if not _PROC.is_dir():
        return
    for name in os.listdir(_PROC):
        if name.isdigit():
            yield int(name)


def _parent(pid: int) -> int | None:
    """Return the parent's id; None for a process that has ended, including a zombie."""
    state, parent = _state_and_parent(pid)
    return None if state in (b"Z", b"X") else parent


def _state_and_parent(pid: int) -> tuple[bytes, int]:
    """Return the letter of a process's state and its parent's id; X for one that is gone."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return b"X", 0
    # The name, in brackets, may contain anything, so parse what follows it.
    state, parent = stat.rpartition(b")")[2].split()[:2]
    return state, int(parent)


def _environment(pid: int) -> list[bytes]:
    """Return the environment; empty for a zombie and for a process of another user."""
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
