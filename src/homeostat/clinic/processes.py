"""Find the processes that this one has started (Linux: /proc)."""

from __future__ import annotations

import os
from pathlib import Path

from homeostat.errors import HomeostatError

_PROC = Path("/proc")


def descendants(text: str) -> list[int]:
    """Return the processes below this one whose command line contains the text."""
    if not _PROC.is_dir():
        raise HomeostatError(
            f"This fault harms a process, which is found in {_PROC}, and this system has none. Run "
            "the clinic on Linux, or name other faults (see homeostat clinic --help)."
        )
    parents = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (stat := _read(entry / "stat")):
            # The name, in brackets, may contain anything, so parse what follows it.
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return [
        process
        for process in parents
        if _descends(process, parents) and text in _read(_PROC / str(process) / "cmdline")
    ]


def workers() -> list[int]:
    """Return the worker processes below this one, without their guardians.

    A guardian that is stopped could not end its worker when this process ends.
    """
    found = descendants("homeostat.workers.child")
    return [process for process in found if _parent(process) in found]


def _parent(process: int) -> int | None:
    stat = _read(_PROC / str(process) / "stat")
    return int(stat.rpartition(")")[2].split()[1]) if stat else None


def _descends(process: int, parents: dict[int, int]) -> bool:
    while process in parents:
        process = parents[process]
        if process == os.getpid():
            return True
    return False


def _read(file: Path) -> str:
    """Read a file of /proc; empty if the process has ended."""
    try:
        return file.read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""
