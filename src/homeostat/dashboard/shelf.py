"""The runs of the given folders. Each is read and judged when it is first asked for, then kept.

A run that has grown on disk is read again: `version` says whether it has.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from homeostat.errors import HomeostatError
from homeostat.health.diagnose import Diagnosis, diagnose
from homeostat.health.readers import RunPlace, open_run, runs_at
from homeostat.health.registry import RULES
from homeostat.health.view import RunView

# Runs that are kept in memory, and files that are looked at to see whether one has grown.
MAX_LOADED = 32
MAX_FILES = 2000
# Bytes and time of the newest file of a run.
Version = tuple[int, int]


@dataclass(frozen=True)
class LoadedRun:
    """A run as it was on disk at a version. It is judged when that is first asked for."""

    view: RunView
    version: Version

    @cached_property
    def diagnosis(self) -> Diagnosis:
        return diagnose(self.view, RULES)


@dataclass(frozen=True, slots=True)
class ShelfRun:
    """A run that was found. `id` stands for its path, and is the same at the next start."""

    id: str
    name: str
    place: RunPlace

    def version(self) -> Version:
        return version_of(self.place)


class Shelf:
    """Finds runs and keeps what was read of them. May be used by several threads."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._loaded: dict[str, LoadedRun] = {}
        self._lock = threading.Lock()
        # One reader per run: a page asks for several parts of a run at once.
        self._reading: dict[str, threading.Lock] = {}

    def runs(self) -> list[ShelfRun]:
        """Return the runs, in the order of the given paths; the newest of a folder first."""
        found = {
            _id(place): place
            for path in self._paths
            for place in runs_at(path)
            # A folder without files has no run yet, and one that was deleted has none any more.
            if place.path != path or version_of(place) != (0, 0)
        }
        names = distinct_names([_shown_path(place) for place in found.values()])
        return [ShelfRun(*one) for one in zip(found, names, found.values(), strict=True)]

    def run(self, id: str) -> ShelfRun:
        """Return a run by its id. Raises HomeostatError."""
        for run in self.runs():
            if run.id == id:
                return run
        raise HomeostatError(f"no run has the id {id!r}: it may have been moved or deleted.")

    def load(self, id: str) -> LoadedRun:
        """Return what a run holds now. Raises HomeostatError if it cannot be read."""
        run = self.run(id)
        with self._lock:
            reading = self._reading.setdefault(id, threading.Lock())
        with reading:
            # Taken before the files are read: what is written meanwhile is a newer version.
            version = run.version()
            known = self._loaded.get(id)
            if known is not None and known.version == version:
                return known
            loaded = LoadedRun(open_run(run.place), version)
            with self._lock:
                self._loaded.pop(id, None)
                self._loaded[id] = loaded
                for old in list(self._loaded)[:-MAX_LOADED]:
                    del self._loaded[old]
            return loaded


def version_of(place: RunPlace) -> Version:
    """Return the sum of sizes and the time of the last change of a run's files."""
    total, newest = 0, 0
    for file in islice(_files(place), MAX_FILES):
        try:
            found = os.stat(file)
        except OSError:
            continue
        total += found.st_size
        newest = max(newest, found.st_mtime_ns)
    return total, newest


def _files(place: RunPlace) -> Iterator[str | Path]:
    if place.files or not place.path.is_dir():
        yield from place.files or (place.path,)
        return
    # Files of a run lie in its folder or in one below it; checkpoints are deeper and large.
    for folder in (place.path, *_children(place.path)):
        try:
            with os.scandir(folder) as entries:
                yield from sorted(entry.path for entry in entries if entry.is_file())
        except OSError:
            continue


def _children(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            found = [entry.path for entry in islice(entries, MAX_FILES) if entry.is_dir()]
    except OSError:
        return []
    return [Path(path) for path in sorted(found)]


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return the last part of each path, with as many parts before it as tell them apart."""
    names = [path.name or str(path) for path in paths]
    for depth in range(2, max((len(path.parts) for path in paths), default=1) + 1):
        taken = Counter(names)
        names = [
            "/".join(path.parts[-depth:]) if taken[name] > 1 else name
            for name, path in zip(names, paths, strict=True)
        ]
    return names


def _id(place: RunPlace) -> str:
    key = "\0".join(str(path.resolve()) for path in (place.path, *place.files))
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:12]


def _shown_path(place: RunPlace) -> Path:
    return (place.files[0] if place.files else place.path).resolve()
