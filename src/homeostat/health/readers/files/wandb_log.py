"""Read the run files of W&B's offline mode (*.wandb) without wandb: history and config.

The file is a LevelDB log: a header of 7 bytes, then blocks of 32 KiB with chunks of crc (4 bytes),
length (2) and type (1: whole, 2: first, 3: middle, 4: last). A record is a protocol buffer: history
= 2, config = 5, run = 17 with its own config. Their items have a key (1), or the parts of one (2),
and a value as JSON (16).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

from homeostat.health.readers.files.protobuf import BYTES, FIXED64, TornError, fields, signed
from homeostat.health.readers.lines.dict_rows import row_of
from homeostat.health.readers.rows.recorder import Recorder
from homeostat.health.readers.values.settings import flat
from homeostat.health.readers.views.build import Found
from homeostat.json_text import parse_json

_HEADER = 7
_BLOCK = 32_768
_MAX_RECORD = 64_000_000
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_HISTORY, _CONFIG, _RUN, _CONFIG_OF_RUN = 2, 5, 17, 4
_INTEGER, _NUMBER, _JSON = 5, 6, (8, 16)


def found_in(file: BinaryIO, *, name: str) -> Found:
    """Read the history and config in a run file. Incomplete records are skipped."""
    recorder = Recorder()
    settings: dict[str, Any] = {}
    for record in _records(file):
        try:
            for number, wire, value in fields(record):
                if wire != BYTES or not isinstance(value, bytes):
                    continue
                if number == _HISTORY:
                    row = row_of(dict(_items(value)))
                    if row is not None:
                        row.form = "wandb"
                        recorder.add(row)
                elif number == _CONFIG:
                    settings.update(_items(value))
                elif number == _RUN:
                    settings.update(_run_config(value))
        except TornError:
            continue
    settings.pop("_wandb", None)
    settings = flat(settings)
    return Found(
        series=recorder.series(),
        forms=recorder.forms,
        settings=settings,
        total_steps=recorder.total_steps,
        runs=[(run.label, run.series, run.settings) for run in recorder.past],
        summary=recorder.summary,
        sources=[name],
    )


def _records(file: BinaryIO) -> Iterator[bytes]:
    """Yield complete records, assembled from their chunks."""
    parts: list[bytes] = []
    size = 0
    for kind, chunk in _chunks(file):
        if kind in (_WHOLE, _FIRST):
            parts, size = [], 0
        parts.append(chunk)
        size += len(chunk)
        if size > _MAX_RECORD:
            parts, size = [], 0
        elif kind in (_WHOLE, _LAST):
            yield b"".join(parts)
            parts, size = [], 0


def _chunks(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    # Blocks are counted from the start of the file, so the first block contains the header.
    at = _HEADER
    while block := file.read(_BLOCK):
        while at + 7 <= len(block):
            length, kind = struct.unpack("<HB", block[at + 4 : at + 7])
            if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or at + 7 + length > len(block):
                break
            yield kind, block[at + 7 : at + 7 + length]
            at += 7 + length
        at = 0


def _run_config(data: bytes) -> Iterator[tuple[str, Any]]:
    for number, wire, value in fields(data):
        if number == _CONFIG_OF_RUN and wire == BYTES and isinstance(value, bytes):
            yield from _items(value)


def _items(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of the items in a history or config record (item or update = 1)."""
    for number, wire, value in fields(data):
        if wire != BYTES or not isinstance(value, bytes):
            continue
        if number == 2:
            steps = [step for field, _, step in fields(value) if field == 1]
            if steps and isinstance(steps[0], int):
                yield "_step", steps[0]
        elif number == 1:
            found = _item(value)
            if found is not None:
                yield found


def _item(data: bytes) -> tuple[str, Any] | None:
    """Return one key and its value: JSON or, in newer files, an integer (5) or number (6)."""
    key, parts, value = "", [], None
    for field, wire, inner in fields(data):
        if isinstance(inner, int):
            value = signed(inner) if field == _INTEGER else value
        elif field == 1:
            key = inner.decode("utf-8", errors="replace")
        elif field == 2:
            parts.append(inner.decode("utf-8", errors="replace"))
        elif field == _NUMBER and wire == FIXED64:
            (value,) = struct.unpack("<d", inner)
        elif field in _JSON:
            try:
                value = parse_json(inner)
            except ValueError:
                return None
    return (key or "/".join(parts), value) if value is not None else None
