"""Find the runs at a path. The doctor, `watch` and the dashboard all use this module.

    a file, a run folder               that run
    a folder with runs of ours below   those, and runs of others beside them
    a folder of runs of others         its subfolders, and its console logs grouped by name
    any other folder                   one run, of all files in it

own_runs.py finds our runs several levels down. Other files are never combined with them: logs and
rows beside them are skipped, and `RunPlace.notes` reports it. Training data does not belong to any
run, so a folder with nothing else is not a run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from homeostat.health.readers.files.examples import columns_of_file
from homeostat.health.readers.places.file_names import (
    is_console,
    is_named_data,
    is_of_trainer,
    is_own,
    is_regular,
    is_rows,
    is_wanted,
    modified,
)
from homeostat.health.readers.places.loose_logs import runs_of
from homeostat.health.readers.places.own_runs import is_our_run, our_runs_below
from homeostat.health.readers.places.run_parts import are_parts

_MAX_ENTRIES = 1_000_000
_MAX_RUNS = 1_000
# Maximum number of files or runs that are listed by name.
_MAX_NAMES = 8
# Maximum number of training data files in a folder that are recognised by opening them.
_MAX_EXAMPLES = 500


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The place of a run: a file, a folder, or some `files` of a folder that has several runs.

    `notes` are sentences about what was skipped where the run was found.
    """

    path: Path
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name to show: the path, or the files that were read as one run."""
        if not self.files:
            return str(self.path)
        return _listed([str(self.files[0]), *(file.name for file in self.files[1:])])

    @property
    def modified(self) -> tuple[float, str]:
        return max(modified(file) for file in self.files or (self.path,))


def runs_at(path: Path) -> list[RunPlace]:
    """Return the runs at a path, newest first: at least one, which may be the path itself."""
    return runs_in(path) or [RunPlace(path)]


def runs_in(path: Path) -> list[RunPlace]:
    """Return the runs in a folder, newest first; [] if the path is itself a run, or a file."""
    if not path.is_dir() or is_our_run(path):
        return []
    ours = our_runs_below(path)
    runs, note = _beside_ours(path, ours) if ours else (_of_others(path), "")
    runs.sort(key=lambda run: run.modified, reverse=True)
    if note:
        runs[0] = replace(runs[0], notes=(note,))
    return runs


def runs_of_files(files: Sequence[Path]) -> list[RunPlace]:
    """Return the runs to which several files belong, newest first.

    Console logs of one folder are grouped by name, as in `runs_in`. Files of training rows and of
    held-out rows are one run. Any other file is a run.
    """
    logs = [file for file in files if is_console(file.name) and file.is_file()]
    runs: list[RunPlace] = []
    for folder in dict.fromkeys(file.parent for file in files if file not in logs):
        others = tuple(file for file in files if file not in logs and file.parent == folder)
        if are_parts(file.stem for file in others):
            runs.append(RunPlace(folder, others))
        else:
            runs += [RunPlace(file) for file in others]
    for folder in dict.fromkeys(file.parent for file in logs):
        there = [file for file in logs if file.parent == folder]
        runs += [RunPlace(folder, group) for group in runs_of(there)]
    return sorted(runs, key=lambda run: run.modified, reverse=True)


def _of_others(path: Path) -> list[RunPlace]:
    children: list[Path] = []
    logs: list[Path] = []
    for found, is_folder in _entries(path):
        if is_folder:
            children.append(found)
        elif is_console(found.name):
            logs.append(found)
        else:
            # The folder itself has metrics, so everything below belongs to it.
            return []
    loose = runs_of(logs) if logs else []
    if len(loose) == 1:
        # All subfolders belong to the folder's only log.
        return []
    runs = [RunPlace(child) for child in children[:_MAX_RUNS] if _is_run(child)]
    if not loose and are_parts(run.path.name for run in runs):
        # They hold the training rows and the held-out rows of one run.
        return []
    runs += [RunPlace(path, files) for files in loose]
    return runs if len(runs) > 1 else []


def _beside_ours(path: Path, ours: Sequence[Path]) -> tuple[list[RunPlace], str]:
    """Return our runs and other runs beside them, and a note about the files that were skipped."""
    # If our runs are directly in the folder, other subfolders with logs are runs, too. Otherwise it
    # may be a project's folder, where logs and tables may be about anything, so only files that a
    # trainer alone writes make a run.
    is_shelf = any(run.parent == path for run in ours)
    runs = [RunPlace(run) for run in ours[:_MAX_RUNS]]
    left: list[str] = []
    files: list[Path] = []
    for found, is_folder in _entries(path):
        if not is_folder:
            files.append(found)
        elif not any(run.is_relative_to(found) for run in ours) and _is_run(found):
            if is_shelf or _is_run(found, by_trainer=True):
                runs.append(RunPlace(found))
            else:
                left.append(f"{found.name}/")
    if any(is_of_trainer(file.name) for file in files):
        return [*runs, RunPlace(path)], _passed_over(path, left, len(ours))
    logs = [file for file in files if is_console(file.name)]
    loose = runs_of(logs) if is_shelf and logs else []
    if len(loose) > 1:
        runs += [RunPlace(path, group) for group in loose]
        files = [file for file in files if file not in logs]
    return runs, _passed_over(path, [*left, *(file.name for file in files)], len(ours))


def _passed_over(path: Path, names: Sequence[str], num_runs: int) -> str:
    if not names:
        return ""
    what = "the run" if num_runs == 1 else f"the {num_runs} runs"
    return (
        f"{path}: {_listed(sorted(names))}: skipped, because they are beside {what} of homeostat "
        "below. To read one of them, give its path."
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _entries(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the subfolders of a folder and the files that belong to runs, each with is_folder.

    Stop without an error if the folder cannot be listed.
    """
    num_examples = 0
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, _MAX_ENTRIES):
                if entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path), True
                elif _is_of_run(entry):
                    # After many files of training data, further files of rows are not opened but
                    # skipped.
                    is_data = is_rows(entry.name) and (
                        num_examples >= _MAX_EXAMPLES or bool(columns_of_file(Path(entry.path)))
                    )
                    num_examples += is_data
                    if not is_data:
                        yield Path(entry.path), False
    except OSError:
        return


def _is_run(folder: Path, *, by_trainer: bool = False) -> bool:
    """Return whether a folder directly contains a log or metrics. A checkpoint is not a run.

    With `by_trainer`, only files count that a trainer alone writes.
    """
    if folder.name.startswith(("checkpoint", "global_step")):
        return False
    files = (found for found, is_folder in _entries(folder) if not is_folder)
    return any(is_of_trainer(file.name) or not by_trainer for file in files)


def _is_of_run(entry: os.DirEntry[str]) -> bool:
    file = Path(entry.path)
    is_one = is_wanted(entry.name) and not is_named_data(file) and not is_own(file)
    return is_one and is_regular(entry)
