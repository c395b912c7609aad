"""Read the log lines that the workers of a group wrote, to quote them in a message.

Workers' lines carry the prefix `[name rank]`; lines without one are the launcher's own.
"""

from __future__ import annotations

import contextlib
import os
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

    def append(self, lines: bytes) -> None:
        """Add lines that were written on another machine. If the disk is full, only these lines are
        lost.
        """
        with contextlib.suppress(OSError), open(self.file, "ab", buffering=0) as file:
            file.write(lines)

    def last_words(self, rank: int) -> str:
        """Return the last lines of a rank, or the launcher's if it wrote none; ready to append."""
        mine, anyones = f"[{self.group_name} {rank}] ", f"[{self.group_name} "
        lines = self._tail()
        own = [line.removeprefix(mine) for line in lines if line.startswith(mine)]
        own = own or [line for line in lines if not line.startswith(anyones)]
        if not own:
            return f"\nIt wrote nothing to {self.file}."
        return "\n".join(
            [f"\nIts last lines in {self.file}:", *own[_first_shown(own) :][:TAIL_LINES]]
        )

    def _tail(self) -> list[str]:
        with contextlib.suppress(OSError), open(self.file, "rb") as lines:
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(self.begin, size - TAIL_BYTES))
            return lines.read().decode("utf-8", "replace").splitlines()
        return []


def _first_shown(lines: list[str]) -> int:
    """Find where the last lines begin: before the stack that Python prints of a crash, if there is
    one, because what a library said of the cause stands above it."""
    crashes = [at for at, line in enumerate(lines) if line.startswith("Fatal Python error")]
    last = max(0, len(lines) - TAIL_LINES)
    return max(0, min(last, crashes[-1] - TAIL_LINES // 3)) if crashes else last
