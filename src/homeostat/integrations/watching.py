"""Follow a run while it is written, and report each finding once.

    a text log                     new bytes are read as they come (readers/growing.py)
    a run folder, other formats    read again whenever a file in it has changed

Every look judges the run as `homeostat doctor` would judge what is there at that moment, so both
give the same findings. A look happens when something is new, at most once in `interval_s`, and only
while all looks together take less than 1 % of the time (pace.py).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from homeostat.errors import DataError, HomeostatError
from homeostat.health.diagnose import diagnose
from homeostat.health.finding import Finding, Level
from homeostat.health.formats.report import Report
from homeostat.health.frameworks import HOMEOSTAT
from homeostat.health.live.open_findings import Key, OpenFindings
from homeostat.health.readers import OUR_FILES, RunPlace, open_run, refuse_recipe, runs_in
from homeostat.health.readers.files.examples import refuse_example_file
from homeostat.health.readers.files.one_file import is_read_by_lines
from homeostat.health.readers.growing import GrowingFile
from homeostat.health.readers.places.own_runs import is_our_run
from homeostat.health.readers.values.settings import read_config
from homeostat.health.records import State
from homeostat.health.rule import Rule
from homeostat.health.view import RunView
from homeostat.integrations.pace import Pace
from homeostat.integrations.telling import Message, Teller
from homeostat.observe.run_dir import writer_of

POLL_S = 0.5
_MAX_DEPTH = 4
_MAX_FILES = 20_000
# Names of tables and documents, which are read as a whole, also while they are still empty.
_WHOLE_SUFFIXES = (".csv", ".json")
_ENDS = ("run_stopped", "run_finished", "run_failed")


class Followed(Protocol):
    """A run that is being written."""

    def poll(self) -> bool:
        """Take in what is new. Return whether there was anything."""
        ...

    def view(self) -> RunView: ...

    def finish(self) -> None:
        """Take in what is still open, because nothing more will come."""
        ...


class Watcher:
    """Judge views of a growing run, and report what changed."""

    def __init__(
        self,
        *,
        run: str,
        rules: Sequence[Rule],
        level: Level,
        tell: Callable[[Message], None],
        stop_on: Level | None = None,
    ) -> None:
        self.run = run
        # Called once, with the first finding of level `stop_on` or above.
        self.stop: Callable[[Finding], None] | None = None
        self.report: Report | None = None
        self._rules = rules
        self._tell = tell
        self._stop_on = stop_on
        self._open = OpenFindings()
        self._teller = Teller(run=run, level=level)

    @property
    def open(self) -> list[Finding]:
        return self._open.findings

    def look(self, view: RunView) -> None:
        """Judge a view, and report what changed since the last one."""
        diagnosis = diagnose(view, self._rules)
        self.report = Report(self.run, view, diagnosis, diagnosis.findings)
        seen: dict[Key, Finding] = {}
        for finding in diagnosis.findings:
            seen.setdefault(finding.key, finding)
        changes = self._open.settle(view.last_step or 0, seen, explained=diagnosis.explained)
        for message in self._teller.messages(changes, view.framework):
            self._tell(message)
        if self._stop_on is None:
            return
        for change in changes:
            grave = change.finding.level.rank >= self._stop_on.rank
            if change.state is State.OPEN and grave and self.stop is not None:
                stop, self.stop = self.stop, None
                stop(change.finding)


def follow(
    followed: Followed, watcher: Watcher, *, interval_s: float, idle_timeout_s: float
) -> str:
    """Follow a run until it ends, or nothing was written for `idle_timeout_s` (0: for ever).

    Return why it ended. Raises KeyboardInterrupt, after a last look, if the user ends it.
    """
    pace = Pace(time.monotonic(), interval_s=interval_s)
    newest, is_new = time.monotonic(), False
    try:
        while True:
            if followed.poll():
                newest, is_new = time.monotonic(), True
            if is_new and pace.is_due(time.monotonic()):
                is_new = not timed_look(followed, watcher, pace)
                if watcher.report is not None and _is_over(watcher.report.view):
                    return "the run has ended"
            if idle_timeout_s and time.monotonic() - newest > idle_timeout_s:
                followed.finish()
                timed_look(followed, watcher, pace)
                return f"nothing was written for {idle_timeout_s:g} s"
            time.sleep(min(POLL_S, interval_s) if interval_s else POLL_S)
    except KeyboardInterrupt:
        followed.finish()
        timed_look(followed, watcher, pace)
        raise


def timed_look(followed: Followed, watcher: Watcher, pace: Pace) -> bool:
    """Look once. Return False if there is nothing yet that can be judged."""
    started = time.thread_time()
    try:
        watcher.look(followed.view())
    except DataError:
        # The run's files have been made, but hold nothing yet.
        return False
    finally:
        pace.looked(time.monotonic(), time.thread_time() - started)
    return True


def _is_over(view: RunView) -> bool:
    """Return whether a run of ours has recorded its end; other logs may always continue."""
    if view.framework is not HOMEOSTAT:
        return False
    own = view.events_of("run_started", "run_resumed", *_ENDS)
    return bool(own) and own[-1].kind in _ENDS


class RereadPlace:
    """A folder, or a file that is not text; all of it is read again whenever it has changed.

    In a folder given as a path, each look finds the newest run, because none may be there yet.
    """

    def __init__(
        self,
        place: Path | RunPlace,
        *,
        config: Path | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._place = place
        self._config = config
        self._names = names
        self._state: tuple[int, int, int] | None = None

    def poll(self) -> bool:
        before, self._state = self._state, _state(self._place)
        return self._state != before

    def view(self) -> RunView:
        return open_run(self._place, config=self._config, names=self._names)

    def finish(self) -> None:
        """Do nothing: every look reads all that is there."""


class NotYet:
    """A path at which there is nothing yet. What appears there is followed: a log, or a folder."""

    def __init__(
        self,
        path: Path,
        *,
        config: Path | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._path = path
        self._config = config
        self._names = names
        self._followed: Followed | None = None

    def poll(self) -> bool:
        if self._followed is None and self._path.exists():
            _, self._followed = followed_path(self._path, config=self._config, names=self._names)
        return self._followed is not None and self._followed.poll()

    def view(self) -> RunView:
        if self._followed is None:
            raise DataError(f"{self._path}: there is no such file or folder.")
        return self._followed.view()

    def finish(self) -> None:
        if self._followed is not None:
            self._followed.finish()


def _state(place: Path | RunPlace) -> tuple[int, int, int]:
    """Return what changes when a file is written: their number, sizes and newest time."""
    count = size = newest = 0
    run = place if isinstance(place, RunPlace) else RunPlace(place)
    for file in run.files or _files_below(run.path):
        try:
            state = os.stat(file)
        except OSError:
            continue
        count, size, newest = count + 1, size + state.st_size, max(newest, state.st_mtime_ns)
    return count, size, newest


def _files_below(path: Path) -> Iterator[str]:
    if not path.is_dir():
        yield str(path)
        return
    waiting, num_seen = [(str(path), 0)], 0
    while waiting and num_seen < _MAX_FILES:
        folder, depth = waiting.pop(0)
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    num_seen += 1
                    if entry.is_dir(follow_symlinks=False):
                        if depth < _MAX_DEPTH:
                            waiting.append((entry.path, depth + 1))
                    else:
                        yield entry.path
        except OSError:
            continue


def followed_path(
    path: Path, *, config: Path | None, names: Mapping[str, str] | None = None
) -> tuple[RunPlace, Followed]:
    """Return the run at a path, and what follows it: of a folder with several runs the newest.

    Raises DataError if the path is a file that no run writes, as training data or a recipe, or that
    cannot be read more than once.
    """
    _refuse_stream(path)
    refuse_example_file(path)
    refuse_recipe(path)
    if not path.exists():
        return RunPlace(path), NotYet(path, config=config, names=names)
    if path.name in OUR_FILES and is_our_run(path.parent):
        path = path.parent
    if path.is_dir():
        found = runs_in(path)
        place = found[0] if found else RunPlace(path)
        return place, RereadPlace(place if found else path, config=config, names=names)
    place = RunPlace(path)
    if path.is_file() and (path.suffix in _WHOLE_SUFFIXES or not is_read_by_lines(path)):
        return place, RereadPlace(place, config=config, names=names)
    settings: dict[str, Any] | None = read_config(config) if config is not None else None
    return place, GrowingFile(path, config=settings, names=names)


def _refuse_stream(path: Path) -> None:
    """Raise DataError for a pipe or a device: opening one waits for its writer, without a word."""
    is_stream = path.exists() and not (path.is_file() or path.is_dir())
    if is_stream or str(path) == "-":
        what = "standard input" if str(path) == "-" else "a pipe or a device"
        raise DataError(
            f"{path}: is {what}, and watch follows files and folders. Start the command through "
            "watch (homeostat watch -- COMMAND), have it write to a file, or let homeostat doctor "
            "- read the pipe to its end."
        )


def stop_own_run(path: Path) -> None:
    """Ask the process that writes to a run directory of ours to stop after its step.

    Raises HomeostatError if no process does, or it may not be signalled.
    """
    writer = writer_of(path)
    if writer is None:
        raise HomeostatError(f"no process writes to {path}, so there is nothing to stop.")
    try:
        os.kill(writer, signal.SIGTERM)
    except OSError as error:
        raise HomeostatError(
            f"process {writer}, which writes to {path}, could not be asked to stop: "
            f"{error.strerror}. Watch it as the same user on the same machine."
        ) from None
