"""Read the scalars of TensorBoard event files without tensorflow.

A file is a chain of records: length (8 bytes), its checksum (4), the event (a protocol buffer), its
checksum (4). Event: step = 2, summary = 5; summary: value = 1; value: tag = 1, simple_value = 2,
tensor = 8. A record that a crash truncated ends the file.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import BinaryIO

from homeostat.health.readers.files.protobuf import (
    BYTES,
    FIXED32,
    VARINT,
    TornError,
    fields,
    signed,
)
from homeostat.health.readers.rows.row import MAX_NAMES, MAX_STEP, unordered_series
from homeostat.health.readers.views.build import Found

_MAX_RECORD = 16_000_000
# DT_FLOAT, DT_DOUBLE -> the layout of a scalar in a tensor's content.
_CONTENT = {1: "<f", 2: "<d"}


def found_in(file: BinaryIO, *, name: str) -> Found:
    """Read the scalars of an event file."""
    columns: dict[str, tuple[array[int], array[float]]] = {}
    for record in _records(file):
        try:
            for step, tag, value in _scalars(record):
                if tag not in columns and len(columns) >= MAX_NAMES:
                    continue
                steps, values = columns.setdefault(tag, (array("q"), array("d")))
                steps.append(step)
                values.append(value)
        except TornError:
            continue
    series = {tag: unordered_series(steps, values) for tag, (steps, values) in columns.items()}
    return Found(
        series=series,
        forms={"tensorboard": max(map(len, series.values()), default=0)},
        sources=[name],
    )


def _records(file: BinaryIO) -> Iterator[bytes]:
    while len(head := file.read(12)) == 12:
        (size,) = struct.unpack("<Q", head[:8])
        if size > _MAX_RECORD:
            return
        record = file.read(size)
        if len(record) < size or len(file.read(4)) < 4:
            return
        yield record


def _scalars(record: bytes) -> Iterator[tuple[int, str, float]]:
    step, summaries = 0, []
    for number, wire, value in fields(record):
        if number == 2 and wire == VARINT and isinstance(value, int):
            step = signed(value)
        elif number == 5 and isinstance(value, bytes):
            summaries.append(value)
    if not 0 <= step < MAX_STEP:
        return
    for summary in summaries:
        for number, wire, value in fields(summary):
            if number == 1 and wire == BYTES and isinstance(value, bytes):
                tag, scalar = _value(value)
                if scalar is not None:
                    yield step, tag, scalar


def _value(data: bytes) -> tuple[str, float | None]:
    tag, scalar = "", None
    for number, wire, value in fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            tag = value[:300].decode("utf-8", errors="replace")
        elif number == 2 and wire == FIXED32:
            (scalar,) = struct.unpack("<f", value)
        elif number == 8:
            scalar = _tensor(value)
    return tag, scalar


def _tensor(data: bytes) -> float | None:
    """Parse a tensor of one number: dtype = 1, content = 4, float_val = 5, double_val = 6."""
    dtype = 0
    for number, _, value in fields(data):
        if number == 1 and isinstance(value, int):
            dtype = value
        elif isinstance(value, bytes):
            shape = {4: _CONTENT.get(dtype), 5: "<f", 6: "<d"}.get(number)
            if shape and len(value) == struct.calcsize(shape):
                return struct.unpack(shape, value)[0]
    return None
