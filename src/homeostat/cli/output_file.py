"""Write the files that options such as --out name."""

from __future__ import annotations

import contextlib
from pathlib import Path

from homeostat.errors import OutputError
from homeostat.observe.durable import not_written, write_atomically


def write_output(path: Path, text: str) -> None:
    """Write a file, all of it or nothing. Raises OutputError.

    A pipe or a device, such as /dev/stdout, gets the text as it is.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            # A link stays one: the file that it leads to is written.
            write_atomically(path.resolve(), text, sync=False)
    except OSError as error:
        raise OutputError(not_written(path, error)) from None


class LineFile:
    """A file that is written line by line, and holds whole lines only. Use it as a context manager.

    A line that a full disk has no room for is cut off again, and OutputError raised.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_bytes = 0
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise OutputError(not_written(path, error)) from None

    def write(self, line: str) -> None:
        """Append a line, which ends with a newline."""
        data = line.encode("utf-8", errors="backslashreplace")
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            # A pipe or a device cannot be cut.
            with contextlib.suppress(OSError):
                self._file.truncate(self._num_bytes)
                self._file.seek(self._num_bytes)
            raise OutputError(not_written(self.path, error)) from None
        self._num_bytes += len(data)

    def flush(self) -> None:
        """Do nothing: every line is written at once."""

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
