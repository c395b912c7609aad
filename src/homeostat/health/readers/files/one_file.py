"""Read one file, according to its name and its first bytes.

    *.jsonl, JSON lines     metrics, many lines at a time; other lines as log
    trainer_state.json      the log history of the HF trainer; other JSON: documents.py
    *.ipynb                 what the cells of a notebook have printed: notebook.py
    *.csv                   metrics in columns
    events.out.tfevents.*   TensorBoard
    *.wandb                 W&B, offline
    anything else           a console log, which may be compressed (packed.py)

Files, standard input and named pipes are read as streams, in lines of bounded length.
"""

from __future__ import annotations

import io
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from homeostat.errors import DataError
from homeostat.health.readers.files import csv_table, documents, notebook, tensorboard, wandb_log
from homeostat.health.readers.files.column_batches import (
    BATCH,
    columns_of_block,
    num_json_objects,
    take_json_block,
    take_numbers,
)
from homeostat.health.readers.files.examples import refuse_example_document, refuse_examples
from homeostat.health.readers.files.long_logs import LongLogReader
from homeostat.health.readers.files.text import TextReader
from homeostat.health.readers.input.packed import is_packed, unpacked, why_no_text
from homeostat.health.readers.input.source import HEAD_BYTES, MAX_STREAM_BYTES, Source
from homeostat.health.readers.lines import script_rows
from homeostat.health.readers.lines.dict_rows import row_of
from homeostat.health.readers.rows.recorder import Recorder
from homeostat.health.readers.views.build import Found
from homeostat.health.reading import Reading
from homeostat.json_text import parse_json

# Maximum size of a JSON document. It is read as a whole, and its values need several times its
# size.
_MAX_DOCUMENT = 64_000_000
# Longer documents that break off are read as logs.
_MAX_MENDED = 8_000_000
# Strings, in which brackets do not count, and brackets.
_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|[\[\]{}]', re.DOTALL)
_CLOSED_BY = {"{": "}", "[": "]"}
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_NOTEBOOK = "a notebook: the outputs of its cells were read, from the first cell to the last."


def found_in_file(path: Path) -> Found:
    """Read a regular file of any kind.

    Raises DataError if it cannot be read, or is a pipe, a device or a socket: the scan of a folder
    must never wait for one.
    """
    if not path.is_file():
        raise DataError(_why_no_file(path))
    return _opened(path, limit=None)


def found_in_parts(parts: Sequence[Path]) -> Found:
    """Read a rotated log like one file: its parts are one text, the oldest part first."""
    if len(parts) == 1:
        return found_in_file(parts[0])
    for part in parts:
        if not part.is_file():
            raise DataError(_why_no_file(part))
    try:
        with io.BufferedReader(_Parts(parts)) as file:
            found = _found(file, parts[-1], limit=None)
    except OSError as error:
        raise DataError(f"{parts[-1]}: cannot be read: {error.strerror or error}.") from None
    found.sources = [str(part) for part in parts]
    return found


class _Parts(io.RawIOBase):
    """Read several files one after the other, as if they were one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__()
        self._waiting = list(paths)
        self._file: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._file is not None or self._waiting:
            if self._file is None:
                self._file = unpacked(self._waiting.pop(0).open("rb"))
            data = self._file.read(len(buffer))
            count = len(data)
            buffer[:count] = data
            if count:
                return count
            self._file.close()
            self._file = None
        return 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


def found_in_named(path: Path) -> Found:
    """Read a path that the user gave. A pipe or device is read like standard input."""
    if path.is_file() or not _is_readable(path):
        return found_in_file(path)
    return _opened(path, limit=MAX_STREAM_BYTES)


def _opened(path: Path, *, limit: int | None) -> Found:
    try:
        with path.open("rb") as file, unpacked(file) as text:
            # A small compressed file may unpack to any size.
            return _found(text, path, limit=limit if text is file else MAX_STREAM_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from None


def _is_readable(path: Path) -> bool:
    try:
        return path.is_fifo() or path.is_char_device()
    except OSError:
        return False


def _why_no_file(path: Path) -> str:
    try:
        path.stat()
    except FileNotFoundError:
        return f"{path}: there is no such file or folder."
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}."
    return f"{path}: is neither a file nor a folder. Give a log, a metrics file or a run folder."


def _found(file: BinaryIO, path: Path, *, limit: int | None) -> Found:
    name = str(path)
    if "tfevents" in path.name:
        return tensorboard.found_in(file, name=name)
    if path.name.endswith(".wandb"):
        return wandb_log.found_in(file, name=name)
    return found_in_stream(Source(file, name=name, limit=limit))


def found_in_stream(source: Source) -> Found:
    """Read bytes of any kind. Raises DataError like `found_in_source`, or if they are not text."""
    if what := why_no_text(source.head):
        raise DataError(f"{source.name}: is {what}.")
    return found_in_source(source)


def found_in_text(text: str, *, name: str) -> Found:
    """Read text that a user pasted."""
    return found_in_source(Source(BytesIO(text.encode("utf-8", errors="replace")), name=name))


def found_in_source(source: Source) -> Found:
    """Read a file or a stream: a document, a table, or a log.

    Raises DataError if it is training data.
    """
    found = _by_head(source)
    found.reading += Reading(notes=tuple(source.notes))
    return found


def _by_head(source: Source) -> Found:
    head, name = source.head, source.name
    refuse_examples(head, name=name)
    if _is_document(head, name):
        data = source.read_all(_MAX_DOCUMENT)
        document = found_in_document(data, name=name) if data is not None else None
        if document is not None:
            return document
    if csv_table.is_table(head.decode("utf-8", errors="replace")):
        return csv_table.found_in(source.lines(), name=name)
    if head[:2] in _UTF_16:
        data = source.read_all(_MAX_DOCUMENT)
        if data is not None:
            return found_in_text(data.decode("utf-16", errors="replace"), name=name)
    return _found_in_blocks(source.blocks(), name=name)


def is_read_by_lines(path: Path) -> bool:
    """Return whether a file is a log, which can be read on while it grows.

    Others are read as a whole. Raises DataError if it cannot be read, or is not text.
    """
    if "tfevents" in path.name or path.name.endswith(".wandb"):
        return False
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from None
    if is_packed(head):
        return False
    if what := why_no_text(head):
        raise DataError(f"{path}: is {what}.")
    return not (
        _is_document(head, path.name)
        or csv_table.is_table(head.decode("utf-8", errors="replace"))
        or head[:2] in _UTF_16
    )


def _is_document(head: bytes, name: str) -> bool:
    """Return whether a text is one JSON document over several lines, not one object per line."""
    start = head.lstrip(b"\xef\xbb\xbf \r\n\t")
    if start.startswith(b"["):
        return name.endswith(".json") and start[1:].lstrip()[:1] in {b"{", b"["}
    if not start.startswith(b"{"):
        return False
    first = start.partition(b"\n")[0]
    return name.endswith((".json", ".ipynb")) or not first.rstrip().endswith(b"}")


def found_in_document(data: bytes, *, name: str) -> Found | None:
    """Read a JSON document: a trainer's state, or metrics of any layout. None if it is neither.

    Raises DataError if it is training data.
    """
    notes: tuple[str, ...] = ()
    try:
        document = parse_json(data)
    except ValueError:
        document = _complete_part(data)
        if document is None:
            return None
        notes = (f"{name}: the JSON breaks off; it was read as far as it goes.",)
    if notebook.is_notebook(document):
        printed = found_in_text(notebook.printed_by(document), name=name)
        printed.reading += Reading(notes=(*notes, f"{name}: {_NOTEBOOK}"))
        return printed
    recorder = Recorder()
    history = document.get("log_history") if isinstance(document, dict) else None
    if isinstance(history, list):
        for record in history:
            row = row_of(record) if isinstance(record, dict) else None
            if row is not None:
                recorder.add(row)
    else:
        refuse_example_document(document, name=name)
        if not documents.record(document, recorder):
            return None
    reader = TextReader(recorder)
    reader.finish()
    found = found_by(reader, name=name)
    total = document.get("max_steps") if isinstance(document, dict) else None
    found.total_steps = total if type(total) is int and total > 0 else found.total_steps
    found.reading += Reading(notes=notes)
    return found


def _complete_part(data: bytes) -> Any:
    """Return a document that breaks off, up to its last whole object; None if it does not."""
    if len(data) > _MAX_MENDED:
        return None
    text = data.decode("utf-8", errors="replace")
    text = text[: text.rfind("}") + 1]
    opened: list[str] = []
    for found in _BRACKETS.finditer(text):
        sign = found[0]
        if sign in _CLOSED_BY:
            opened.append(_CLOSED_BY[sign])
        elif sign[0] != '"' and (not opened or opened.pop() != sign):
            return None
    try:
        return parse_json(text + "".join(reversed(opened))) if opened else None
    except ValueError:
        return None


def _found_in_blocks(blocks: Iterator[bytes], *, name: str) -> Found:
    lines = LogLines()
    for block in blocks:
        lines.take_block(block)
    lines.flush()
    lines.reader.finish()
    return found_by(lines.reader, name=name)


class LogLines:
    """Read the lines of a log in order: JSON lines many at a time, others one by one."""

    def __init__(self) -> None:
        self.reader = LongLogReader()
        self._waiting: list[bytes] = []

    def take_block(self, block: bytes) -> None:
        """Read a block of whole lines, which has line ends between the lines only."""
        columns = columns_of_block(block)
        if columns is not None:
            self.flush()
            if take_numbers(self.reader.recorder, columns):
                self.reader.skip(len(next(iter(columns.values()))))
                return
        num_objects = num_json_objects(block) if columns is None else 0
        if num_objects >= BATCH:
            self.flush()
            if take_json_block(self.reader.recorder, block, num_lines=num_objects):
                self.reader.skip(num_objects)
                return
        lines = block.split(b"\n")
        if self._waiting or b"{" in block:
            self.take(lines)
        else:
            self.reader.feed_bytes(lines)

    def take(self, lines: list[bytes]) -> None:
        if not self._waiting and not any(map(_is_object_start, lines)):
            self.reader.feed_bytes(lines)
            return
        if all(map(_is_object_start, lines)) and all(map(_is_object_end, lines)):
            self._waiting += lines
            if len(self._waiting) >= BATCH:
                self.flush()
            return
        plain: list[bytes] = []
        for line in lines:
            if line[:1] == b"{" and line.rstrip()[-1:] == b"}":
                # The lines of a log must be read in order.
                if plain:
                    self.reader.feed_bytes(plain)
                    plain = []
                self._waiting.append(line)
                if len(self._waiting) >= BATCH:
                    self.flush()
            else:
                if self._waiting:
                    self.flush()
                plain.append(line)
        self.reader.feed_bytes(plain)

    def flush(self) -> None:
        """Read the JSON lines that were collected for a batch."""
        lines, self._waiting = self._waiting, []
        num, block = len(lines), b"\n".join(lines)
        is_metrics = num >= 8 and block.startswith(b'{"')
        if is_metrics and take_json_block(self.reader.recorder, block, num_lines=num):
            self.reader.skip(num)
        elif lines:
            self.reader.feed_bytes(lines)


_is_object_start = operator.methodcaller("startswith", b"{")
_is_object_end = operator.methodcaller("endswith", b"}")


def found_by(reader: TextReader, *, name: str) -> Found:
    """Return what a text reader has found so far."""
    recorder = reader.recorder
    series, forms, total = recorder.series(), recorder.forms, recorder.total_steps
    reading, decimals = reader.reading(), recorder.decimals()
    if reader.scripts.is_better_than(series, forms=forms):
        series = reader.scripts.series()
        forms = {script_rows.FORM: max(map(len, series.values()))}
        total = total or reader.scripts.total_steps()
        decimals = reader.scripts.decimals()
        reading = replace(reading, num_unread_rows=0, unread_rows=())
    return Found(
        series=series,
        forms=forms,
        settings=reader.settings,
        log=reader.kept.log(by_engine=reader.recorder.newest is None),
        events=reader.events,
        samples=reader.samples.found,
        decimals=decimals,
        total_steps=total,
        runs=[(run.label, run.series, run.settings) for run in recorder.past],
        summary=recorder.summary,
        sources=[name],
        reading=reading,
        unknown={} if series else reader.unknown.series(),
        open_bar=reader.open_bar(),
    )
