"""What the workers of a group wrote, read back for a message.

Workers' lines carry the prefix `[name rank]`; lines without one are the launcher's own.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 12
TAIL_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class WorkerLog:
    """A log file from the byte on where this group began to write."""

    file: Path
    group_name: str
    begin: int

    @classmethod
    def begin_now(cls, file: Path, *, group_name: str) -> WorkerLog:
        return cls(file, group_name, file.stat().st_size if file.exists() else 0)

    def last_words(self, rank: int) -> str:
        """The last lines of a rank, or of the launcher if the rank wrote none; ready to append."""
        mine, anyones = f"[{self.group_name} {rank}] ", f"[{self.group_name} "
        lines = self._tail()
        own = [line.removeprefix(mine) for line in lines if line.startswith(mine)]
        own = own or [line for line in lines if not line.startswith(anyones)]
        if not own:
            return f"\nIt wrote nothing to {self.file}."
        return "\n".join([f"\nIts last lines in {self.file}:", *own[-TAIL_LINES:]])

    def _tail(self) -> list[str]:
        with contextlib.suppress(OSError), open(self.file, "rb") as lines:
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(self.begin, size - TAIL_BYTES))
            return lines.read().decode("utf-8", "replace").splitlines()
        return []


def describe_exit(code: int | None) -> str:
    """How a process ended, by the code that subprocess gives it; None: nobody knows."""
    if code is None:
        return "was killed from outside, together with its guardian"
    if code >= 0:
        return f"ended with exit code {code}"
    name = _SIGNALS.get(-code, f"signal {-code}")
    hint = " (the system does this when memory runs out)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


_SIGNALS = {int(number): number.name for number in signal.Signals}
