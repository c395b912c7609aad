"""Read the scalars of TensorBoard event files without tensorflow.

A file is a chain of records: length (8 bytes), its checksum (4), the event (a protocol buffer), its
checksum (4). Event: step = 2, summary = 5; summary: value = 1; value: tag = 1, simple_value = 2,
tensor = 8. A record that a crash truncated ends the file. A record whose checksum is wrong is left
out; if that of its length is wrong, nothing after it can be read. Both are reported.
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
from homeostat.health.reading import Reading

_MAX_RECORD = 16_000_000
# Records of scalars are shorter. The checksum of a longer one would take too long.
_MAX_CHECKED = 1_024
# DT_FLOAT, DT_DOUBLE -> the layout of a scalar in a tensor's content.
_CONTENT = {1: "<f", 2: "<d"}


def found_in(file: BinaryIO, *, name: str) -> Found:
    """Read the scalars of an event file."""
    columns: dict[str, tuple[array[int], array[float]]] = {}
    records = _Records(file)
    for record in records:
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
        reading=Reading(notes=tuple(f"{name}: {damage}" for damage in records.damages())),
    )


class _Records:
    """The records of an event file, and what of it is damaged."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_read = 0
        self._num_wrong = 0
        self._breaks_off = False

    def __iter__(self) -> Iterator[bytes]:
        while len(head := self._file.read(12)) == 12:
            size, checksum = struct.unpack("<QI", head)
            if size > _MAX_RECORD or checksum != _masked_crc(head[:8]):
                self._breaks_off = True
                return
            record, end = self._file.read(size), self._file.read(4)
            if len(record) < size or len(end) < 4:
                return
            self._num_read += 1
            if size <= _MAX_CHECKED and struct.unpack("<I", end)[0] != _masked_crc(record):
                self._num_wrong += 1
            else:
                yield record

    def damages(self) -> Iterator[str]:
        if self._num_wrong:
            were = "1 record was" if self._num_wrong == 1 else f"{self._num_wrong:,} records were"
            yield f"{were} left out, because the checksum is wrong."
        if self._breaks_off:
            yield f"the file is damaged after {self._num_read:,} records; the rest was not read."


def _crc_table() -> list[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_CRC_TABLE = _crc_table()


def _masked_crc(data: bytes) -> int:
    """Return the checksum of TFRecord files: CRC-32C, rotated and offset."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


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
