"""Report on a worker that does not answer: its state, last calls and the stacks of its threads.

The guardian reads the worker's record (activity.py) and its state as the system knows it, and has
the worker print the Python stack of every thread by a signal that Python's faulthandler handles in
C: that works while the main thread waits in a collective or in any other C code. Standard library
only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from homeostat.workers.activity import Activity, ActivityRecord

# The signal upon which a worker prints its stacks.
STACK_SIGNAL = signal.SIGUSR2
STACK_SECONDS = 3.0
MAX_STACK_BYTES = 2**18

# Letters of /proc/PID/stat.
_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a device or a disk",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The state of one worker, as its guardian reads it."""

    rank: int
    state: str
    cpu_seconds: float
    activity: Activity
    stacks: str

    @property
    def is_stopped(self) -> bool:
        return self.state in (_STATES["T"], _STATES["t"])


class StackFile:
    """An unnamed file that the worker prints its stacks to and its guardian reads."""

    def __init__(self) -> None:
        # Both processes keep it open until they end.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115

    def fileno(self) -> int:
        return self._file.fileno()

    def ask(self, worker: int) -> str:
        """Ask the worker for its stacks; empty if it does not answer within STACK_SECONDS."""
        start = size = os.fstat(self.fileno()).st_size
        end = time.monotonic() + STACK_SECONDS
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, STACK_SIGNAL)
        while time.monotonic() < end:
            time.sleep(0.05)
            before, size = size, os.fstat(self.fileno()).st_size
            # It is written in pieces without an end mark: complete once it stops growing.
            if size > start and size == before:
                break
        return os.pread(self.fileno(), MAX_STACK_BYTES, start).decode("utf-8", "replace")


def report_on(worker: int, *, rank: int, record: ActivityRecord, stacks: StackFile) -> WorkerReport:
    """Inspect a worker from outside. A stopped worker cannot print, so its last operations must
    suffice.
    """
    state, cpu_seconds = _state_of(worker)
    # A stopped process prints only when it is continued; a young one would be killed by the signal.
    can_print = record.prints_stacks and state not in (_STATES["T"], _STATES["t"], _STATES["Z"])
    text = stacks.ask(worker) if can_print else ""
    if can_print and not text:
        # A signal takes a moment to stop a process: it may have run when it was first looked at.
        state, cpu_seconds = _state_of(worker)
    return WorkerReport(rank, state, cpu_seconds, record.read(), text)


def _state_of(pid: int) -> tuple[str, float]:
    """Return the state of a process and its CPU time; where there is no /proc, neither is known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "in an unknown state", 0.0
    # The name, in brackets, may contain anything, so parse what follows it.
    fields = stat.rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return _STATES.get(fields[0], fields[0]), ticks / os.sysconf("SC_CLK_TCK")
