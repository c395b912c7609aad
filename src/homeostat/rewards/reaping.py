"""Ends what a reward started, also what it hid: a child that was forked twice, in its own session.

Two nets, on Linux:

    subreaper   the guardian adopts orphans below it, so that it finds them among its descendants
    marker      every process below a worker has the worker's marker in its environment, so that
                they are found even where the guardian was killed with its group

Both look at /proc, on any architecture. A process is only ended if it descends from the guardian or
carries the marker, which is drawn anew for every worker: no other run's process can be meant. Where
there is no /proc (macOS), the worker's process group is ended and nothing else. Stdlib only.
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
# A process may fork while it is being looked for: looked again until none is left, or this long.
END_SECONDS = 2.0
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it."""
    if sys.platform == "linux":
        # A kernel that cannot do it leaves the other net.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(root: int) -> None:
    """Kill every process below `root`."""
    _end_all(lambda: _descendants(root))


def end_marked(marker: str) -> None:
    """Kill every process that has the marker in its environment, this one excepted."""
    wanted = f"{MARKER}={marker}".encode()
    _end_all(lambda: [pid for pid in _processes() if wanted in _environment(pid)])


def _end_all(find: Callable[[], Iterable[int]]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while (found := [pid for pid in find() if pid != os.getpid()]) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
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
    """None for a process that has ended, a zombie among them."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name, in brackets, may hold anything; what follows it does not.
    state, parent = stat.rpartition(b")")[2].split()[:2]
    return None if state in (b"Z", b"X") else int(parent)


def _environment(pid: int) -> list[bytes]:
    """Empty for a zombie, and for a process of another user."""
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
