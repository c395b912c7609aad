"""Standard output that keeps a run alive if its reader goes away.

A pipe closes (`| head`), a terminal disappears, the disk under `> log.txt` fills up, an encoding
lacks a character: none of these may end a run. All output is in console.log anyway.
"""

from __future__ import annotations

import os
from typing import IO, Any


class Outlet:
    """A text stream for a rich Console. After the first failed write it writes nothing more."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

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
