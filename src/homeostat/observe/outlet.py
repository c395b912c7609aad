"""Standard output of a run that goes on when its reader does not.

A pipe closes (`| head`), a terminal goes away, the disk under `> log.txt` fills up, an encoding
lacks a character: none of them is a reason to lose a run. All it would have said is in console.log.
"""

from __future__ import annotations

import os
from typing import IO, Any


class Outlet:
    """A text stream for a rich Console. After the first write that fails it says nothing more."""

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
        """Question marks for what the stream cannot encode: they take as much room."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return text.encode(encoding, errors="replace").decode(encoding)

    def _give_up(self) -> None:
        """What is still in the stream's buffer must go somewhere, or it fails again at exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
