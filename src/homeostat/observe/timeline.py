"""The timeline of a run: what each process did when, as Chrome trace JSON that Perfetto opens.

    phases of the loop, calls of workers -> Timeline.add -> trace/timeline.json

One row per process: the controller, trainer ranks, engines, reward workers. All times are taken by
the controller's clock, when a call is sent and when its answer arrives, so rows of processes on
other machines are aligned without knowing their clocks. The file is written as things happen, so
that a killed run leaves a trace, and its size is bounded: a full file becomes timeline.old.json,
and the one before that is removed.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Protocol

CONTROLLER = "controller"
FILE, OLD_FILE = "timeline.json", "timeline.old.json"
MAX_BYTES = 16 * 2**20
# Shorter calls would only fill the file: nobody sees them.
MIN_SECONDS = 0.0005

log = logging.getLogger(__name__)


class OnSpan(Protocol):
    """Called when a process has done something, with times of time.monotonic()."""

    def __call__(self, row: str, name: str, *, began: float, ended: float) -> None: ...


class Timeline:
    """Writes spans of processes. Several threads may add; without a folder nothing is written."""

    def __init__(self, folder: Path | None, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._file: TextIOWrapper | None = None
        self._num_bytes = 0
        self._rows: dict[str, int] = {}
        # Spans are measured by the monotonic clock; a trace has the time of day.
        self._epoch_s = time.time() - time.monotonic()

    def add(self, row: str, name: str, *, began: float, ended: float, **args: Any) -> None:
        """Add a span in seconds of time.monotonic() to the row of a process."""
        if self._folder is None or ended - began < MIN_SECONDS:
            return
        with self._lock:
            try:
                self._add(row, name, began, ended, args)
            except OSError as error:
                log.warning("the timeline ends here: %s", error)
                self._folder = None

    @contextmanager
    def phase(self, name: str, *, step: int) -> Iterator[None]:
        """Add the block to the controller's row."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(CONTROLLER, name, began=began, ended=time.monotonic(), step=step)

    def close(self) -> None:
        """End the file, which is valid JSON from then on. Idempotent."""
        with self._lock:
            self._folder = None
            self._end_file()

    def _add(self, row: str, name: str, began: float, ended: float, args: dict[str, Any]) -> None:
        if self._num_bytes > self._max_bytes:
            self._end_file()
        if self._file is None:
            self._begin_file()
        if row not in self._rows:
            self._name_row(row)
        span = {
            **{"name": name, "ph": "X", "pid": self._rows[row], "tid": 1},
            "ts": round((self._epoch_s + began) * 1e6),
            "dur": max(1, round((ended - began) * 1e6)),
        }
        self._write({**span, "args": args} if args else span)

    def _begin_file(self) -> None:
        assert self._folder is not None, "a timeline without a folder has no file"
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / FILE
        if file.exists():
            file.replace(self._folder / OLD_FILE)
        # One line at a time reaches the disk, so that a killed run leaves them.
        self._file = open(file, "w", buffering=1)  # noqa: SIM115
        self._num_bytes = self._file.write("[\n")
        self._rows = {}
        self._name_row(CONTROLLER)

    def _name_row(self, row: str) -> None:
        self._rows[row] = pid = len(self._rows) + 1
        for name, value in (("process_name", {"name": row}), ("process_sort_index", _order(row))):
            self._write({"name": name, "ph": "M", "pid": pid, "tid": 1, "args": value})

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        separator = ",\n" if self._num_bytes > 2 else ""
        self._num_bytes += self._file.write(separator + json.dumps(record))

    def _end_file(self) -> None:
        file, self._file = self._file, None
        self._num_bytes = 0
        if file is None:
            return
        try:
            with file:
                file.write("\n]\n")
        except OSError as error:
            log.warning("the timeline has no end: %s", error)


def _order(row: str) -> dict[str, int]:
    """Sort the rows: controller, trainer ranks by number, engines, reward workers."""
    kinds = (CONTROLLER, "trainer", "engine", "helper", "reward")
    kind = next((at for at, name in enumerate(kinds) if row.startswith(name)), len(kinds))
    digits = row.rpartition(" ")[2]
    return {"sort_index": 10_000 * kind + (int(digits) if digits.isdigit() else 0)}
