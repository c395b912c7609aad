"""Read a log while it is being written: each part is read once, and a view is always available.

    GrowingLog     reads bytes of one or several streams in the order in which they arrive
    GrowingFile    a file that grows, is rotated (another file gets its name) or is truncated

The view is the same as that of the whole text so far, except for the parts that are incomplete: a
line without an end, and a literal over several lines that is not closed yet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from homeostat.errors import DataError
from homeostat.health.readers.files.one_file import LogLines, found_by
from homeostat.health.readers.input.source import MAX_LINE
from homeostat.health.readers.views.build import Found, view_of
from homeostat.health.view import RunView, Series

_CHUNK = 1 << 20


class GrowingLog:
    """A log that is read as it arrives. The view reports `name` as its source."""

    def __init__(
        self,
        name: str,
        *,
        config: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._config = config
        self._names = names
        self._lines = LogLines()
        # Stream -> the bytes after its last line end.
        self._begun: dict[int, bytes] = {}

    def feed(self, data: bytes, *, stream: int = 0) -> None:
        """Add bytes that a stream wrote. Lines of different streams are not mixed."""
        lines = (self._begun.get(stream, b"") + data).split(b"\n")
        rest = lines.pop()
        if len(rest) > MAX_LINE:
            # A progress bar may be redrawn with carriage returns for hours without a line end.
            drawn, sign, rest = rest.rpartition(b"\r")
            lines += [drawn[-MAX_LINE:]] if sign else []
            rest = rest[-MAX_LINE:]
        self._begun[stream] = rest
        if lines:
            self._lines.take(lines)

    def end_line(self, *, stream: int = 0) -> None:
        """Read a last line without a line end, because the stream has ended."""
        rest = self._begun.pop(stream, b"")
        if rest:
            self._lines.take([rest])

    def finish(self) -> None:
        """Read everything that is incomplete, because all streams have ended."""
        for stream in list(self._begun):
            self.end_line(stream=stream)
        self._lines.flush()
        self._lines.reader.finish()

    def view(self) -> RunView:
        """Return the run as far as it was read. The view stays valid when more is read."""
        self._lines.flush()
        found = found_by(self._lines.reader, name=self._name)
        found.series = {name: _copy(one) for name, one in found.series.items()}
        found.unknown = {name: _copy(one) for name, one in found.unknown.items()}
        return view_of(_frozen(found), config=self._config, names=self._names)


def _copy(series: Series) -> Series:
    # Series share the reader's memory, which cannot grow while a view of it exists.
    return Series(series.steps.copy(), series.values.copy())


def _frozen(found: Found) -> Found:
    """Copy the containers that the reader continues to fill."""
    found.settings = dict(found.settings)
    found.forms = dict(found.forms)
    return found


class GrowingFile:
    """A text file that is followed by its name, like `tail -F`."""

    def __init__(
        self,
        path: Path,
        *,
        config: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._path = path
        self._log = GrowingLog(str(path), config=config, names=names)
        self._file: BinaryIO | None = None

    def poll(self) -> bool:
        """Read the new part of the files. Return whether there was anything new."""
        is_new = self._read_on()
        try:
            state = self._path.stat()
        except FileNotFoundError:
            # The file is not written yet, or is being rotated.
            return is_new
        if self._file is None or not os.path.samestat(os.fstat(self._file.fileno()), state):
            self.close()
            self._log.end_line()
            self._file = self._opened()
        elif state.st_size < self._file.tell():
            self._log.end_line()
            self._file.seek(0)
        return self._read_on() or is_new

    def _opened(self) -> BinaryIO:
        try:
            return self._path.open("rb")
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror or error}.") from None

    def _read_on(self) -> bool:
        is_new = False
        while self._file is not None and (data := self._file.read(_CHUNK)):
            self._log.feed(data)
            is_new = True
        return is_new

    def finish(self) -> None:
        self._log.finish()

    def view(self) -> RunView:
        return self._log.view()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
