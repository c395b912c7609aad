"""Standard output that keeps a run alive if its reader goes away.

A pipe closes (`| head`), a terminal disappears, the disk under `> log.txt` fills up, an encoding
lacks a character, there is no output at all (`>&-`, some service managers): none of these may end
a run. All output is in console.log anyway.
"""

from __future__ import annotations

import os
import sys
from typing import IO, Any


def open_missing_streams() -> None:
    """Connect standard descriptors that were closed to the null device.

    Otherwise the next files that are opened, such as metrics.jsonl, become the standard output of
    this process and of all it starts.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is used, and the ones below are taken.
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


class Outlet:
    """A text stream for a rich Console. After the first failed write it writes nothing more."""

    def __init__(self, stream: IO[str] | None) -> None:
        """Write to `stream`, or nowhere if Python has none because its descriptor was closed."""
        # Open for as long as the process runs.
        self._stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def write(self, text: str) -> int:
        try:
            return self._stream.write(self._encodable(text))
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def _encodable(self, text: str) -> str:
        """Replace characters that the stream cannot encode by question marks of the same width."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return text.encode(encoding, errors="replace").decode(encoding)

    def _give_up(self) -> None:
        """Redirect the stream's buffer, because flushing it at exit would fail again."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
