"""Append-only JSON lines that survive crashes and full disks.

Invariant: the file always holds whole lines, in the order in which they were appended; a line that
a crash left incomplete is dropped when the file is opened again. JSON is strict: a float that is
not finite is written as the string "nan", "inf" or "-inf", and the reader turns exactly these
strings back into floats.

These files are only logs: the state of training is in checkpoints and the journal, which are
checked strictly. Readers therefore skip a line that was damaged from outside, and say so; a writer
moves it to <file>.damaged, so that the file itself is valid again.

A write that fails (full disk, quota) does not raise: the incomplete part is removed, the line waits
in memory and is retried before the next one.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from homeostat.json_text import parse_json

MAX_WAITING_LINES = 10_000
_MAX_NUMBER = 10**18
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

log = logging.getLogger(__name__)

IsSound = Callable[[Mapping[str, Any]], bool]
_SHOWN = 5


def encode(record: Mapping[str, Any]) -> bytes:
    """Return one line of strict JSON, with its newline."""
    text = json.dumps(_plain(record), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: _restored(item) for name, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value


def is_record(record: Mapping[str, Any]) -> bool:
    """Return whether a line is valid: it has a step, and all its numbers can be floats."""
    numbers = [value for value in record.values() if isinstance(value, int)]
    time = record.get("time", 0.0)
    return (
        type(record.get("step")) is int
        and isinstance(time, (int, float))
        and all(abs(number) < _MAX_NUMBER for number in (*numbers, time))
    )


def is_metrics(record: Mapping[str, Any]) -> bool:
    """Return whether a line is a metric record."""
    return is_record(record) and all(isinstance(value, (int, float)) for value in record.values())


def is_event(record: Mapping[str, Any]) -> bool:
    """Return whether a line is an event."""
    return is_record(record) and "time" in record and isinstance(record.get("kind"), str)


def is_finding(record: Mapping[str, Any]) -> bool:
    """Return whether a line is a finding that opened or closed: code, name and level."""
    texts = ("code", "name", "level", "state")
    return is_record(record) and all(isinstance(record.get(name), str) for name in texts)


def is_row_losses(record: Mapping[str, Any]) -> bool:
    """Return whether a line has row ids and losses as two lists of equal length."""
    ids, losses = record.get("row_ids"), record.get("losses")
    if not (is_record(record) and isinstance(ids, list) and isinstance(losses, list)):
        return False
    numbers = all(type(x) is int for x in ids) and all(type(x) is float for x in losses)
    return numbers and len(ids) == len(losses)


def iter_jsonl(
    path: Path, *, is_sound: IsSound = lambda record: True, damaged: list[int] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the records of a file one at a time. A missing file has none.

    An incomplete last line is skipped. Other invalid lines are skipped, too: their numbers are
    added to `damaged` if it is given, else they are logged.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    numbers = [] if damaged is None else damaged
    with file:
        for number, line in enumerate(file, start=1):
            record = _decode(line)
            if record is not None and is_sound(record):
                yield record
            elif line.endswith(b"\n"):
                numbers.append(number)
    if numbers and damaged is None:
        log.warning("%s: damaged lines were passed over: %s", path, shown_numbers(numbers))


def shown_numbers(numbers: Sequence[int]) -> str:
    """Return the first few line numbers as text, and how many there are."""
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return ", ".join(str(number) for number in numbers[:_SHOWN]) + more


def read_metrics(path: Path, *, damaged: list[int] | None = None) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, with `step`, `time` and the metrics as floats."""
    return list(iter_jsonl(path, is_sound=is_metrics, damaged=damaged))


def set_aside_damaged(path: Path, *, is_sound: IsSound) -> int:
    """Move invalid lines to <file>.damaged, and return how many there were."""
    damaged: list[int] = []
    for _ in iter_jsonl(path, is_sound=is_sound, damaged=damaged):
        pass
    if not damaged:
        return 0
    partial, bad = path.with_name(f".{path.name}.partial"), frozenset(damaged)
    with path.open("rb") as old, partial.open("wb") as new, _aside(path).open("ab") as aside:
        for number, line in enumerate(old, start=1):
            (aside if number in bad else new).write(line)
        for file in (aside, new):
            file.flush()
            os.fsync(file.fileno())
    os.replace(partial, path)
    return len(damaged)


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return _restored(record) if isinstance(record, dict) and line.endswith(b"\n") else None


def drop_torn_lines(path: Path) -> int:
    """Cut everything after the last whole record. Return the number of bytes cut."""
    with path.open("r+b") as file:
        size = good = file.seek(0, os.SEEK_END)
        while good > 0:
            start = _line_start(file, good)
            file.seek(start)
            if _decode(file.read(good - start)) is not None:
                break
            good = start
        file.truncate(good)
    return size - good


def _line_start(file: Any, end: int, block: int = 65536) -> int:
    """Return the offset at which the line that ends just before `end` begins."""
    position = end - 1
    while position > 0:
        start = max(0, position - block)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0


class JsonlWriter:
    """Append records to one file. `sync` flushes each record to disk before continuing."""

    def __init__(self, path: Path, *, sync: bool = False, is_sound: IsSound = is_record) -> None:
        self.path = path
        self.sync = sync
        self.num_failed_writes = 0
        self.num_dropped = 0
        self.num_set_aside = 0
        self._waiting: deque[bytes] = deque()
        if path.is_file():
            cut = drop_torn_lines(path)
            if cut:
                log.info("%s: dropped %d bytes of a line torn by a crash", path.name, cut)
            self.num_set_aside = set_aside_damaged(path, is_sound=is_sound)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._good_size = os.fstat(self._fd).st_size

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record; if the write fails it is retried before the next one."""
        self._waiting.append(encode(record))
        self.flush()
        if len(self._waiting) > MAX_WAITING_LINES:
            self._waiting.popleft()
            self.num_dropped += 1

    def flush(self) -> None:
        """Write the waiting records, oldest first, until a write fails."""
        try:
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            self.num_failed_writes += 1
            if self.num_failed_writes == 1:
                log.warning(
                    "cannot write %s (%s): records wait in memory and are tried again",
                    self.path,
                    error.strerror,
                )

    def _write(self, line: bytes) -> None:
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self._fd, left) :]
            if self.sync:
                os.fsync(self._fd)
        except OSError:
            # Truncating needs no space, so the incomplete part can be removed even if the disk is
            # full.
            if os.fstat(self._fd).st_size > self._good_size:
                os.ftruncate(self._fd, self._good_size)
            raise
        self._good_size += len(line)

    def cut_after(self, step: int) -> int:
        """Remove the records of later steps, which are all at the end, and return their number.

        This is one ftruncate: it needs no disk space, and a crash leaves the file either as before
        or as after.
        """
        self.flush()
        offset, cut_at, num_cut = 0, None, 0
        with self.path.open("rb") as file:
            for line in file:
                record = _decode(line)
                if cut_at is None and record is not None and record["step"] > step:
                    cut_at = offset
                num_cut += cut_at is not None
                offset += len(line)
        if cut_at is not None:
            os.ftruncate(self._fd, cut_at)
            os.fsync(self._fd)
            self._good_size = cut_at
        return num_cut

    def close(self) -> None:
        if self._fd < 0:
            return
        self.flush()
        lost = len(self._waiting) + self.num_dropped
        if lost:
            log.error("%s: %d records could not be written and are lost", self.path, lost)
        os.close(self._fd)
        self._fd = -1
