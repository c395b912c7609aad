"""One file -> what it holds, by its name and its first bytes.

    *.jsonl, JSON lines     metrics, many lines at a time; odd lines as log
    trainer_state.json      the log history of the HF trainer
    *.csv                   metrics in columns
    events.out.tfevents.*   TensorBoard
    *.wandb                 W&B, offline
    anything else           a console log

A file is read as a stream, in lines of bounded length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from homeostat.errors import DataError
from homeostat.health.readers import csv_table, tensorboard, wandb_log
from homeostat.health.readers.build import Found
from homeostat.health.readers.column_batches import BATCH, take_json_lines
from homeostat.health.readers.dict_rows import row_of
from homeostat.health.readers.recorder import Recorder
from homeostat.health.readers.text import TextReader

_MAX_LINE = 4_000_000
_MAX_DOCUMENT = 256_000_000
_HEAD = 65_536


def found_in_file(path: Path) -> Found:
    """Whatever the file is. Raises DataError where it cannot be read."""
    try:
        if not path.is_file():
            raise DataError(_why_no_file(path))
        with path.open("rb") as file:
            return _found(file, path)
    except OSError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from None


def _why_no_file(path: Path) -> str:
    if not path.exists():
        return f"{path}: there is no such file or folder."
    return f"{path}: is neither a file nor a folder. Give a log, a metrics file or a run folder."


def _found(file: BinaryIO, path: Path) -> Found:
    name = str(path)
    if "tfevents" in path.name:
        return tensorboard.found_in(file, name=name)
    if path.name.endswith(".wandb"):
        return wandb_log.found_in(file, name=name)
    head = file.read(_HEAD)
    file.seek(0)
    if _is_document(head, path.name) and path.stat().st_size <= _MAX_DOCUMENT:
        document = found_in_document(file.read(), name=name)
        if document is not None:
            return document
        file.seek(0)
    if csv_table.is_table(head.decode("utf-8", errors="replace")):
        return csv_table.found_in(_text_lines(file), name=name)
    if head[:2] in {b"\xff\xfe", b"\xfe\xff"}:
        return found_in_text(file.read(_MAX_DOCUMENT).decode("utf-16", errors="replace"), name=name)
    return _found_in_lines(_lines(file), name=name)


def found_in_text(text: str, *, name: str) -> Found:
    """What a text holds that somebody pasted."""
    data = text.encode("utf-8", errors="replace")
    if _is_document(data[:_HEAD], ""):
        document = found_in_document(data, name=name)
        if document is not None:
            return document
    if csv_table.is_table(text[:_HEAD]):
        return csv_table.found_in(iter(text.splitlines()), name=name)
    return _found_in_lines(iter(data.splitlines(keepends=True)), name=name)


def _is_document(head: bytes, name: str) -> bool:
    """Whether a text is one JSON object over several lines, and not one a line."""
    start = head.lstrip(b"\xef\xbb\xbf \r\n\t")
    if not start.startswith(b"{"):
        return False
    first = start.partition(b"\n")[0]
    return name.endswith(".json") or not first.rstrip().endswith(b"}")


def found_in_document(data: bytes, *, name: str) -> Found | None:
    """A JSON document: the trainer's state with its history, or a config. None: neither."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    history = document.get("log_history")
    if not isinstance(history, list):
        return None
    recorder = Recorder()
    for record in history:
        row = row_of(record) if isinstance(record, dict) else None
        if row is not None:
            recorder.add(row)
    reader = TextReader(recorder)
    total = document.get("max_steps")
    found = found_by(reader, name=name)
    found.total_steps = total if type(total) is int and total > 0 else found.total_steps
    return found


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(_MAX_LINE):
        yield line


def _text_lines(file: BinaryIO) -> Iterator[str]:
    for line in _lines(file):
        yield line.decode("utf-8", errors="replace")


def _found_in_lines(lines: Iterator[bytes], *, name: str) -> Found:
    reader = TextReader()
    waiting: list[bytes] = []
    for line in lines:
        if line[:1] == b"{" and line.rstrip()[-1:] == b"}":
            waiting.append(line)
            if len(waiting) >= BATCH:
                waiting = _take(reader, waiting)
        else:
            # A log: its lines must be taken in their order.
            waiting = _take(reader, waiting)
            reader.feed((line.decode("utf-8", errors="replace"),))
    _take(reader, waiting)
    return found_by(reader, name=name)


def _take(reader: TextReader, lines: list[bytes]) -> list[bytes]:
    """Take what waits, and wait for more."""
    if len(lines) >= 8 and lines[0][:2] == b'{"' and take_json_lines(reader.recorder, lines):
        reader.skip(len(lines))
    else:
        reader.feed(line.decode("utf-8", errors="replace") for line in lines)
    return []


def found_by(reader: TextReader, *, name: str) -> Found:
    """What a reader of text has found when the text is over."""
    reader.finish()
    recorder = reader.recorder
    return Found(
        series=recorder.series(),
        forms=recorder.forms,
        settings=reader.settings,
        log=reader.kept.log(by_engine=reader.recorder.newest is None),
        events=reader.events,
        samples=reader.samples.found,
        decimals=recorder.decimals(),
        total_steps=recorder.total_steps,
        runs=[(run.label, run.series, run.settings) for run in recorder.past],
        summary=recorder.summary,
        sources=[name],
        reading=reader.reading(),
    )
