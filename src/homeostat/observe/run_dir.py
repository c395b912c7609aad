"""The run directory: where each file is, and who may write there.

    config.json, config.yaml   the resolved config, and the recipe as given
    metrics.jsonl              one record per log interval (names: observe/names.py)
    findings.jsonl             findings: a line when one opens, and one when it closes
    events.jsonl               what happened: resumes, checkpoints, skipped steps ...
    row_losses.jsonl           row ids and losses of each step
    healing.json               remedies that were tried when the run last went back to a checkpoint
    expert_load.jsonl          load of every expert, of models with experts (observe/expert_load.py)
    journal/                   scored rollouts before they are trained on (rollout/journal.py)
    completions/               sampled completions for people to read (observe/completions.py)
    trace/                     timeline of all processes for Perfetto (observe/timeline.py)
    hangs/                     stacks of worker processes that hung (workers/hang.py)
    checkpoints/ offending_rows/ sinks/
    console.log traceback.txt report.html

Invariant: one process writes at a time. The lock is the kernel's (flock), so it is released when
the process that holds it ends, however that happens. Records of steps that will be computed again
are removed on resume (`truncate_after`), so that a step never has two records; events are history
and stay.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from homeostat.arrays import FloatArray, IntArray
from homeostat.errors import RunDirError, RunDirWriteError
from homeostat.observe.durable import OUT_OF_SPACE, write_atomically
from homeostat.observe.expert_load import is_expert_load
from homeostat.observe.jsonl import (
    JsonlWriter,
    encode,
    is_event,
    is_finding,
    is_metrics,
    is_row_losses,
)
from homeostat.observe.redact import Scrubber


class RunPaths:
    """The paths of a run's files. Reading needs no more than this: no lock, no side effects."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_json = path / "config.json"
        self.config_yaml = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.findings = path / "findings.jsonl"
        self.row_losses = path / "row_losses.jsonl"
        self.expert_load = path / "expert_load.jsonl"
        self.healing = path / "healing.json"
        self.checkpoints = path / "checkpoints"
        self.journal = path / "journal"
        self.completions = path / "completions"
        self.offending_rows = path / "offending_rows"
        self.trace = path / "trace"
        self.sinks = path / "sinks"
        self.console_log = path / "console.log"
        self.traceback = path / "traceback.txt"
        self.report = path / "report.html"

    def inside(self, folder: str) -> Path:
        """Return a folder inside the run directory that a setting names, such as the profiler's."""
        found = (self.path / folder).resolve()
        if not found.is_relative_to(self.path.resolve()):
            raise RunDirError(
                f"the folder {folder!r} lies outside the run directory {self.path}. "
                "Give a relative path inside it."
            )
        return self.path / folder


class RunDir(RunPaths):
    """The run directory, locked and open for writing. Use it as a context manager, or close it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # Removes secrets from everything written for others to read; `protect` adds more of them.
        self.scrubber = self.terminal_scrubber = Scrubber.of({}, environ=os.environ)
        self._is_gone = False
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._require_plain_files()
            self._lock_fd: int | None = _lock(path / ".lock")
            # A run directory counts as used once it contains an event.
            self.was_used = self.events.is_file() and self.events.stat().st_size > 0
            self._metrics = JsonlWriter(self.metrics, is_sound=is_metrics)
            self._events = JsonlWriter(self.events, sync=True, is_sound=is_event)
            self._row_losses = JsonlWriter(self.row_losses, is_sound=is_row_losses)
            self._findings = JsonlWriter(self.findings, is_sound=is_finding)
            # Dense models have no such file.
            self._expert_load = self._open_load() if self.expert_load.is_file() else None
        except OSError as error:
            if isinstance(error, RunDirError):
                raise
            kind = RunDirWriteError if error.errno in OUT_OF_SPACE else RunDirError
            raise kind(
                f"cannot use the run directory {path}: {error.strerror}. Change runs_dir or name."
            ) from None
        _forget_lock_in_children(self)

    def _require_plain_files(self) -> None:
        """Refuse anything but regular files where we write: a pipe would block forever."""
        texts = (self.config_json, self.config_yaml, self.console_log, self.traceback, self.report)
        texts += (self.healing,)
        records = (self.metrics, self.events, self.findings, self.row_losses, self.expert_load)
        for path in (*texts, *records, self.path / ".lock"):
            if os.path.lexists(path) and not path.is_file():
                raise RunDirError(
                    f"{path} is not a plain file, and the run writes one there. Move it away, or "
                    "give this run another name (name=...)."
                )

    @property
    def set_aside(self) -> dict[str, int]:
        """Return how many damaged lines were moved to <file>.damaged on opening, by file name."""
        writers = (*self._writers, self._events)
        return {w.path.name: w.num_set_aside for w in writers if w.num_set_aside}

    def protect(self, config: Mapping[str, Any]) -> None:
        """Keep the private values of this config out of events, findings and logs."""
        self.scrubber = Scrubber.of(config, environ=os.environ)
        self.terminal_scrubber = Scrubber.of(config, environ=os.environ, shows_paths=True)

    def _require_there(self) -> None:
        """Raise once if the folder was deleted, moved or replaced during the run.

        The open files would still accept every record, but nobody could ever read them.
        """
        if self._lock_fd is None or self._is_gone:
            return
        try:
            there = os.path.samestat(os.stat(self.path / ".lock"), os.fstat(self._lock_fd))
        except (FileNotFoundError, NotADirectoryError):
            there = False
        if not there:
            self._is_gone = True
            raise RunDirWriteError(
                f"the run directory {self.path} was deleted, moved or replaced while the run was "
                "going on, so nothing more can be recorded. Start the run again; what was moved "
                "elsewhere can be moved back first."
            )

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._require_there()
        self._metrics.append({"step": step, "time": round(time.time(), 3), **metrics})

    def append_event(self, kind: str, step: int, **fields: Any) -> None:
        self._require_there()
        fields = self.scrubber.tree(fields)
        self._events.append({"kind": kind, "step": step, "time": round(time.time(), 3), **fields})

    def append_finding(self, step: int, finding: Mapping[str, Any]) -> None:
        finding = self.scrubber.tree(finding)
        self._findings.append({"step": step, "time": round(time.time(), 3), **finding})

    def append_row_losses(
        self,
        step: int,
        *,
        row_ids: IntArray | Sequence[int],
        losses: FloatArray | Sequence[float],
    ) -> None:
        """Append the row ids and mean losses of one step, in the same order."""
        assert len(row_ids) == len(losses), (len(row_ids), len(losses))
        # Four decimals keep the losses readable and the file small.
        rounded = [round(float(loss), 4) for loss in losses]
        self._row_losses.append({"step": step, "row_ids": list(row_ids), "losses": rounded})

    def append_expert_load(self, record: Mapping[str, Any]) -> None:
        """Append a record of observe/expert_load.py."""
        if self._expert_load is None:
            self._expert_load = self._open_load()
        self._expert_load.append(record)

    def truncate_after(self, step: int) -> int:
        """Remove metrics, row losses, findings and load of later steps. Return their number."""
        return sum(writer.cut_after(step) for writer in self._writers)

    @property
    def _writers(self) -> list[JsonlWriter]:
        """Return the open files whose records belong to steps; events are history."""
        writers = (self._metrics, self._row_losses, self._findings, self._expert_load)
        return [writer for writer in writers if writer is not None]

    def _open_load(self) -> JsonlWriter:
        return JsonlWriter(self.expert_load, is_sound=is_expert_load)

    def write_config(self, resolved: str, *, recipe: str) -> None:
        """Write the resolved config (JSON), and the recipe's text as the user gave it.

        Both are complete, because a resumed run needs them, so only the user may read them.
        """
        try:
            write_atomically(self.config_json, resolved, mode=0o600)
            write_atomically(self.config_yaml, recipe, mode=0o600)
        except OSError as error:
            raise RunDirWriteError(
                f"the run directory {self.path} cannot be written: {error.strerror}. Free some "
                "space, or set runs_dir to another disk. Nothing saved is lost."
            ) from None

    def write_offending_rows(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Save the rows of a step that went wrong, one JSON object per line."""
        self.offending_rows.mkdir(exist_ok=True)
        path = self.offending_rows / f"step_{step}.jsonl"
        write_atomically(path, b"".join(encode(row) for row in rows).decode("utf-8"))
        return path

    def write_traceback(self, text: str) -> None:
        write_atomically(self.traceback, self.scrubber.text(text))

    def close(self) -> None:
        """Write what is waiting and release the lock. Idempotent."""
        for writer in (*self._writers, self._events):
            writer.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lock(path: Path) -> int:
    """Take the lock, or name the process that holds it. The file contains its process id."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", errors="replace").strip() or "(unknown)"
        os.close(fd)
        raise RunDirError(
            f"the run directory {path.parent} is in use by process {holder}. Wait for it or end "
            "it, or give this run another name (name=...)."
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd


def writer_of(path: Path) -> int | None:
    """Return the id of the process that writes to a run directory; None if none does."""
    try:
        fd = os.open(path / ".lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", errors="replace").strip()
        return int(holder) if holder.isdecimal() else None
    finally:
        os.close(fd)
    return None


def _forget_lock_in_children(run_dir: RunDir) -> None:
    """Make forked workers close their copy of the lock, so that they cannot keep it."""
    reference = weakref.ref(run_dir)

    def forget() -> None:
        owner = reference()
        if owner is not None and owner._lock_fd is not None:
            os.close(owner._lock_fd)
            owner._lock_fd = None

    os.register_at_fork(after_in_child=forget)
