"""Read folders of other frameworks: every known file in them, joined.

All names of a folder are listed, however many; only files whose names are those of logs or metrics
are opened. Anything but a regular file (a pipe, a socket) is never opened, because a scan must not
wait for it. Skipped files are reported. A folder whose children are separate runs, or that holds
loose logs of several runs, contains several runs (`runs_in`): they are never joined.

If several files have a metric, the one with the most values counts; the trainer's own state takes
precedence over a log, whose rows may have no steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from homeostat.errors import DataError
from homeostat.health.log import Log, LogLine
from homeostat.health.readers.build import Found
from homeostat.health.readers.files import found_in_parts
from homeostat.health.readers.loose_logs import LOG_SUFFIXES, is_rotated, runs_of, with_parts
from homeostat.health.readers.settings import flat, read_config
from homeostat.health.reading import Reading

_MAX_DEPTH = 4
_MAX_ENTRIES = 1_000_000
_MAX_FILES = 40
_MAX_RUNS = 1_000
# Files of a run that are known by name.
_MAX_NAMES = 8
_LOG_NAMES = frozenset({"log.txt", "train_log.txt", "output.txt"})
_LOG_STARTS = ("stdout", "stderr")
_CONFIGS = frozenset(
    {
        "config.yaml",
        "config.yml",
        "config.json",
        "args.json",
        "training_args.yaml",
        "config.toml",
        "training_args.json",
        "wandb-metadata.json",
        "llamaboard_config.yaml",
        "hparams.yaml",
    }
)
# A later file replaces a metric of an earlier one only with clearly more of it.
_MORE = 1.2
# Parts of names of files that hold rows, texts or what the doctor itself wrote, and no metrics.
_NOT_METRICS = (
    "dataset", "data", "train.jsonl", "test.jsonl", "completions", "samples", "homeostat_findings",
)  # fmt: skip
# Number of last lines of a file without steps that are taken for the end of the run.
_AT_END = 200


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The place of a run: a file, a folder, or some `files` of a folder that holds other runs."""

    path: Path
    files: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """Return the name to show: the path, or the files that were taken as one run."""
        if not self.files:
            return str(self.path)
        names = [str(self.files[0]), *(file.name for file in self.files[1:])]
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return ", ".join(names[:_MAX_NAMES]) + more

    @property
    def modified(self) -> tuple[float, str]:
        return max(_modified(file) for file in self.files or (self.path,))


def found_in_folder(path: Path, *, only: Sequence[Path] = ()) -> Found:
    """Read all known files of a folder, or `only` these, which are one run.

    Raises DataError if it cannot be listed.
    """
    merged = Found()
    notes: list[str] = []
    files = sorted(only or _files(path, notes))
    chosen = _chosen(files)
    read: list[Found] = []
    for parts in with_parts(chosen[:_MAX_FILES]):
        try:
            read.append(found_in_parts(parts))
        except DataError as error:
            # A file that cannot be read must not prevent reading the others.
            notes.append(str(error))
    for found in _placed(read):
        _merge(merged, found)
    if len(chosen) > _MAX_FILES:
        passed = ", ".join(file.name for file in chosen[_MAX_FILES:][:3])
        notes.append(
            f"{path}: {len(chosen)} files look like logs or metrics; {_MAX_FILES} were read, "
            f"others were passed over ({passed} ...). Name one of them to have it read."
        )
    merged.reading += Reading(notes=tuple(notes))
    merged.joined = [os.path.relpath(source, path) for source in merged.sources]
    for file in sorted(file for file in files if file.name in _CONFIGS):
        settings = _settings(file)
        if settings:
            merged.settings = {**merged.settings, **settings}
            merged.sources.append(str(file))
    return merged


def runs_in(path: Path) -> list[RunPlace]:
    """Return the runs of a folder that contains several, newest first; [] if it is a run itself."""
    children: list[Path] = []
    logs: list[Path] = []
    try:
        with os.scandir(path) as entries:
            for entry in islice(entries, _MAX_ENTRIES):
                if entry.is_dir(follow_symlinks=False):
                    children.append(Path(entry.path))
                elif _is_of_run(entry):
                    if not _is_console(entry.name):
                        # The folder itself has metrics, so everything below belongs to it.
                        return []
                    logs.append(Path(entry.path))
    except OSError:
        return []
    loose = runs_of(logs) if logs else []
    if len(loose) == 1:
        # So do they to its one log.
        return []
    runs = [RunPlace(child) for child in children[:_MAX_RUNS] if _is_run(child)]
    runs += [RunPlace(path, files) for files in loose]
    return sorted(runs, key=lambda run: run.modified, reverse=True) if len(runs) > 1 else []


def _is_run(folder: Path) -> bool:
    """Return whether a folder directly contains a log or metrics; a checkpoint belongs to a run."""
    if folder.name.startswith(("checkpoint", "global_step")):
        return False
    try:
        with os.scandir(folder) as entries:
            return any(_is_of_run(entry) for entry in islice(entries, _MAX_ENTRIES))
    except OSError:
        return False


def _is_of_run(entry: os.DirEntry[str]) -> bool:
    file = Path(entry.path)
    is_one = _is_wanted(entry.name) and not _is_data(file) and not _is_own(file)
    return is_one and _is_regular(entry)


def _files(path: Path, notes: list[str]) -> Iterator[Path]:
    """Return the files of a folder that are wanted, by their names."""
    num_seen, waiting = 0, [(path, 0)]
    while waiting:
        folder, depth = waiting.pop(0)
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    num_seen += 1
                    if num_seen > _MAX_ENTRIES:
                        notes.append(f"{path}: only the first {_MAX_ENTRIES:,} entries were seen.")
                        return
                    if entry.is_dir(follow_symlinks=False):
                        if depth < _MAX_DEPTH:
                            waiting.append((Path(entry.path), depth + 1))
                    elif _is_wanted(entry.name) or entry.name in _CONFIGS:
                        if _is_regular(entry):
                            yield Path(entry.path)
                        else:
                            notes.append(f"{entry.path}: is no regular file and was passed over.")
        except OSError as error:
            notes.append(f"{folder}: cannot be listed: {error.strerror}.")


def _is_regular(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        # The links form a loop.
        return False


def _is_wanted(name: str) -> bool:
    """Return whether a name is that of a log or of metrics."""
    return (
        name == "trainer_state.json"
        or name.endswith((".jsonl", ".csv", ".wandb"))
        or "tfevents" in name
        or _is_console(name)
    )


def _is_console(name: str) -> bool:
    """Return whether a name is that of a console log."""
    return (
        name.endswith(LOG_SUFFIXES)
        or is_rotated(name)
        or name in _LOG_NAMES
        or (name.startswith(_LOG_STARTS) and not name.endswith((".jsonl", ".csv", ".wandb")))
    )


def _chosen(files: list[Path]) -> list[Path]:
    """Return the files to read, in the order of their reliability."""
    states = [file for file in files if file.name == "trainer_state.json"]
    groups = [
        sorted(states, key=_modified)[-1:],
        [file for file in files if file.suffix == ".jsonl" and not _is_data(file)],
        [file for file in files if file.suffix == ".csv" and not _is_data(file)],
        [file for file in files if "tfevents" in file.name],
        [file for file in files if file.suffix == ".wandb"],
        [file for file in files if _is_suffixed(file) and not _is_own(file)],
        [file for file in files if file.name in _LOG_NAMES or _is_redirected(file)],
    ]
    # If there are too many of a kind, read the newest.
    newest = [
        sorted(sorted(group, key=_modified)[-_MAX_FILES // 2 :])
        if len(group) > _MAX_FILES
        else group
        for group in groups
    ]
    rest = [file for group, kept in zip(groups, newest, strict=True) for file in group
            if file not in set(kept)]  # fmt: skip
    return [*(file for group in newest for file in group), *rest]


def _is_suffixed(file: Path) -> bool:
    return file.suffix in LOG_SUFFIXES or is_rotated(file.name)


def _is_redirected(file: Path) -> bool:
    """Return whether a name is that of redirected output: stdout.txt, stderr and similar."""
    is_other = _is_suffixed(file) or file.suffix in (".jsonl", ".csv")
    return file.name.startswith(_LOG_STARTS) and not is_other


def _is_data(file: Path) -> bool:
    return any(word in file.name.lower() for word in _NOT_METRICS)


def _is_own(file: Path) -> bool:
    """Return whether a log is the tracker's about itself."""
    return file.name.startswith("debug") and "wandb" in file.parts


def _modified(file: Path) -> tuple[float, str]:
    try:
        return file.stat().st_mtime, str(file)
    except OSError:
        return 0.0, str(file)


def _placed(read: Sequence[Found]) -> list[Found]:
    """Return the files with those last that print no steps, at whose end the run ended.

    A job's errors, or the text of another rank, are often in a separate file. When its last
    lines were written is not known; if they say how the run ended, they are of its last step.
    """
    ends = [int(one.steps[-1]) for found in read for one in found.series.values() if len(one)]
    stepless = [found for found in read if ends and not found.series and _has_no_steps(found)]
    for found in stepless:
        lines = found.log.lines
        at_end = (LogLine(one.number, one.text, max(ends)) for one in lines[-_AT_END:])
        found.log = Log((*lines[:-_AT_END], *at_end))
    return [found for found in read if found not in stepless] + stepless


def _has_no_steps(found: Found) -> bool:
    return all(line.step is None for line in found.log.lines)


def _merge(merged: Found, found: Found) -> None:
    for name, series in found.series.items():
        known = merged.series.get(name)
        if known is None or len(series) > _MORE * len(known):
            merged.series[name] = series
    merged.unknown = {**found.unknown, **merged.unknown}
    for form, count in found.forms.items():
        merged.forms[form] = merged.forms.get(form, 0) + count
    merged.settings = {**found.settings, **merged.settings}
    merged.decimals = {**found.decimals, **merged.decimals}
    merged.summary = {**found.summary, **merged.summary}
    merged.events.extend(found.events)
    merged.samples.extend(found.samples)
    merged.runs = merged.runs or found.runs
    merged.total_steps = merged.total_steps or found.total_steps
    merged.open_bar = merged.open_bar or found.open_bar
    last = merged.log.lines[-1].number if merged.log else 0
    moved = (LogLine(line.number + last, line.text, line.step) for line in found.log.lines)
    merged.log = Log((*merged.log.lines, *moved))
    merged.sources.extend(found.sources)
    merged.reading += found.reading


def _settings(file: Path) -> dict[str, Any]:
    try:
        config = read_config(file)
    except DataError:
        return {}
    # A model's description contains no settings of the run, although some names are the same.
    if "model_type" in config or "architectures" in config:
        return {}
    return flat({name: _unwrapped(value) for name, value in config.items() if name[:1] != "_"})


def _unwrapped(value: Any) -> Any:
    """Unwrap W&B's settings, which have the form {"value": ..., "desc": ...}."""
    if isinstance(value, Mapping) and "value" in value and value.keys() <= {"value", "desc"}:
        return value["value"]
    return value
