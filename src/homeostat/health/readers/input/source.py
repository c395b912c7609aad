"""Read the bytes of a file or a stream once from the start, as lines of bounded length.

A pipe has no size and may never end. It is read until it ends, until the user presses Ctrl-C, or up
to `limit` bytes. What was read so far is then judged, and `notes` reports it. Memory does not grow
with the input: of a line longer than MAX_LINE only the beginning and the end are kept, and progress
bars that are redrawn with carriage returns for megabytes are passed on in parts.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO

from homeostat.health.readers.input.packed import Unpacking

MAX_STREAM_BYTES = 4_000_000_000
MAX_LINE = 4_000_000
_LINE_HEAD, _LINE_TAIL = 3_000_000, 1_000_000
_CHUNK = 1 << 20
# Number of bytes at the start by which the kind of a file is recognised.
HEAD_BYTES = 65_536
_BREAKS_OFF = "the compressed file is damaged or incomplete; it was read as far as it goes."


class Source:
    """A file or stream with its name. `interrupt` stops reading; a signal handler may call it."""

    def __init__(self, file: BinaryIO, *, name: str, limit: int | None = None) -> None:
        self.name = name
        self._notes: list[str] = []
        self._file = file
        self._limit = limit
        self._num_read = 0
        self._num_cut = 0
        self._is_waiting = False
        self._is_interrupted = False
        self._waiting: list[bytes] = []
        self.head = self._first(HEAD_BYTES)

    @property
    def notes(self) -> list[str]:
        """Return sentences about what was not read."""
        raw = self._file.raw if isinstance(self._file, io.BufferedReader) else None
        if isinstance(raw, Unpacking) and raw.is_cut:
            return [*self._notes, f"{self.name}: {_BREAKS_OFF}", *self._cut()]
        return [*self._notes, *self._cut()]

    def _cut(self) -> list[str]:
        if not self._num_cut:
            return []
        are = "1 line is" if self._num_cut == 1 else f"{self._num_cut:,} lines are"
        return [
            f"{self.name}: {are} longer than {MAX_LINE:,} bytes; of each the "
            f"first {_LINE_HEAD:,} and the last {_LINE_TAIL:,} were read."
        ]

    def interrupt(self) -> None:
        """Stop reading. Raises KeyboardInterrupt to end a read that is waiting."""
        self._is_interrupted = True
        if self._is_waiting:
            raise KeyboardInterrupt

    def read_all(self, most: int) -> bytes | None:
        """Return the whole content; None if it exceeds `most` bytes (they can still be read)."""
        size = sum(map(len, self._waiting))
        while size <= most and (data := self._next()):
            self._waiting.append(data)
            size += len(data)
        whole = b"".join(self._waiting)
        self._waiting = [whole]
        return whole if size <= most else None

    def blocks(self) -> Iterator[bytes]:
        """Yield all lines in order, in blocks of many lines with line ends between them."""
        begun: list[bytes] = []
        for data in self._chunks():
            end = data.rfind(b"\n")
            if end < 0:
                begun.append(data)
            else:
                yield self._completed(begun, data, end)
                begun = [data[end + 1 :]]
            if sum(map(len, begun)) > 2 * MAX_LINE:
                drawn, sign, rest = b"".join(begun).rpartition(b"\r")
                if sign:
                    yield drawn
                    begun = [rest]
                else:
                    begun = [_shortened(rest)]
        if any(begun):
            yield self._joined(begun)

    def lines(self) -> Iterator[str]:
        for block in self.blocks():
            for line in block.split(b"\n"):
                yield line.decode("utf-8", errors="replace")

    def _completed(self, begun: list[bytes], data: bytes, end: int) -> bytes:
        """Return the lines of `data` up to the line end at `end`, with `begun` before the first."""
        first = data.find(b"\n") if any(begun) else 0
        if sum(map(len, begun)) + first <= MAX_LINE:
            return b"".join([*begun, memoryview(data)[:end]])
        return self._joined([*begun, data[:first]]) + data[first:end]

    def _joined(self, parts: list[bytes]) -> bytes:
        line = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(line) <= MAX_LINE or b"\r" in line:
            return line
        self._num_cut += 1
        return _shortened(line)

    def _chunks(self) -> Iterator[bytes]:
        yield from self._waiting
        self._waiting = []
        while data := self._next():
            yield data

    def _first(self, count: int) -> bytes:
        size = 0
        while size < count and (data := self._next()):
            self._waiting.append(data)
            size += len(data)
        return b"".join(self._waiting)[:count]

    def _next(self) -> bytes:
        """Return some bytes as soon as there are any; b"" at the end."""
        if self._is_interrupted:
            self._stop(f"reading was interrupted after {self._num_read:,} bytes")
            return b""
        if self._limit is not None and self._num_read >= self._limit:
            self._stop(f"reading stopped after {self._num_read:,} bytes, which is the limit")
            return b""
        self._is_waiting = True
        try:
            file = self._file
            data = file.read1(_CHUNK) if isinstance(file, io.BufferedReader) else file.read(_CHUNK)
        except KeyboardInterrupt:
            self._is_interrupted = True
            data = b""
        finally:
            self._is_waiting = False
        self._num_read += len(data)
        if self._is_interrupted:
            self._stop(f"reading was interrupted after {self._num_read:,} bytes")
        return data

    def _stop(self, why: str) -> None:
        self._is_interrupted = True
        if not self._notes:
            self._notes.append(f"{self.name}: {why}; the rest was not read or judged.")


def _shortened(line: bytes) -> bytes:
    return line[:_LINE_HEAD] + b" ... " + line[-_LINE_TAIL:]
