"""Read folders of other frameworks: every known file in them, combined.

All names of a folder are listed, however many there are. Only files whose names are those of logs
or metrics are opened, and only regular files, because a scan must not wait for a pipe or a socket.
Skipped files are reported, including training data. A folder may have several runs (run_places.py):
they are never combined, and a run of ours in the folder is skipped.

If several files have the same metric, the one with the most values is used. The trainer's own state
takes precedence over a log, whose rows may have no steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from homeostat.errors import DataError
from homeostat.health.log import Log, LogLine
from homeostat.health.readers.files.examples import columns_of_file, names_of
from homeostat.health.readers.files.one_file import found_in_parts
from homeostat.health.readers.places.file_names import (
    CONFIGS,
    LOG_NAMES,
    is_named_data,
    is_own,
    is_redirected,
    is_regular,
    is_rows,
    is_suffixed,
    is_wanted,
    modified,
)
from homeostat.health.readers.places.loose_logs import with_parts
from homeostat.health.readers.places.own_runs import MAX_DEPTH, is_our_run
from homeostat.health.readers.places.run_parts import mark_held_out
from homeostat.health.readers.values.settings import flat, read_config
from homeostat.health.readers.views.build import Found
from homeostat.health.reading import Reading

_MAX_ENTRIES = 1_000_000
_MAX_FILES = 40
# Maximum number of files that are checked for training data, and of those that are reported by
# name.
_MAX_EXAMPLES = 500
_MAX_NAMED = 4
# A metric of a later file replaces that of an earlier one only if it has this many times the
# values.
_MORE = 1.2
# In a file without steps, this many last lines are taken for the end of the run.
_AT_END = 200


def found_in_folder(path: Path, *, only: Sequence[Path] = ()) -> Found:
    """Read all known files of a folder, or `only` these files, which are one run.

    If a folder cannot be listed, the reading has a note about it.
    """
    merged = Found()
    notes: list[str] = []
    files = sorted(only or _files(path, notes))
    examples = _examples(files)
    if examples:
        notes.append(_not_read(path, examples))
    chosen = [file for file in _chosen(files) if file not in examples]
    read: list[tuple[Path, Found]] = []
    for parts in with_parts(chosen[:_MAX_FILES]):
        try:
            read.append((parts[0], found_in_parts(parts)))
        except DataError as error:
            # A file that cannot be read must not prevent reading the others.
            notes.append(str(error))
    mark_held_out(read, path)
    for found in _placed([found for _, found in read]):
        _merge(merged, found)
    if len(chosen) > _MAX_FILES:
        passed = ", ".join(file.name for file in chosen[_MAX_FILES:][:3])
        notes.append(
            f"{path}: {len(chosen)} files look like logs or metrics; {_MAX_FILES} were read, "
            f"the others were skipped ({passed} ...). To read one of them, give its path."
        )
    merged.joined = [os.path.relpath(source, path) for source in merged.sources]
    for file in sorted(file for file in files if file.name in CONFIGS):
        settings = _settings(file, notes)
        if settings:
            merged.settings = {**merged.settings, **settings}
            merged.sources.append(str(file))
    merged.reading += Reading(notes=tuple(notes))
    return merged


def _examples(files: Sequence[Path]) -> dict[Path, tuple[str, ...]]:
    """Return the columns of the files that hold training data."""
    rows = [file for file in files if is_rows(file.name)]
    found = {file: columns_of_file(file) for file in rows[:_MAX_EXAMPLES]}
    return {file: columns for file, columns in found.items() if columns}


def _not_read(path: Path, examples: Mapping[Path, tuple[str, ...]]) -> str:
    named = [f"{os.path.relpath(file, path)} ({names_of(one)})" for file, one in examples.items()]
    more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    return f"{path}: skipped as training data: {', '.join(named[:_MAX_NAMED])}{more}."


def _files(path: Path, notes: list[str]) -> Iterator[Path]:
    """Yield the files of a folder that may belong to a run, judged by their names."""
    num_seen, waiting = 0, [(path, 0)]
    while waiting:
        folder, depth = waiting.pop(0)
        if depth and is_our_run(folder):
            notes.append(f"{folder}: is a separate run of homeostat, so it was skipped.")
            continue
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    num_seen += 1
                    if num_seen > _MAX_ENTRIES:
                        notes.append(f"{path}: only the first {_MAX_ENTRIES:,} entries were read.")
                        return
                    if entry.is_dir(follow_symlinks=False):
                        if depth < MAX_DEPTH:
                            waiting.append((Path(entry.path), depth + 1))
                    elif is_wanted(entry.name) or entry.name in CONFIGS:
                        if is_regular(entry):
                            yield Path(entry.path)
                        else:
                            notes.append(f"{entry.path}: is not a regular file and was skipped.")
        except OSError as error:
            notes.append(f"{folder}: cannot be listed: {error.strerror}.")


def _chosen(files: list[Path]) -> list[Path]:
    """Return the files to read, the most reliable ones first."""
    states = [file for file in files if file.name == "trainer_state.json"]
    groups = [
        sorted(states, key=modified)[-1:],
        [file for file in files if file.suffix == ".jsonl" and not is_named_data(file)],
        [file for file in files if file.suffix == ".csv" and not is_named_data(file)],
        [file for file in files if "tfevents" in file.name],
        [file for file in files if file.suffix == ".wandb"],
        [file for file in files if is_suffixed(file) and not is_own(file)],
        [file for file in files if file.name in LOG_NAMES or is_redirected(file)],
    ]
    # If there are too many files of a kind, read the newest.
    newest = [
        sorted(sorted(group, key=modified)[-_MAX_FILES // 2 :])
        if len(group) > _MAX_FILES
        else group
        for group in groups
    ]
    rest = [file for group, kept in zip(groups, newest, strict=True) for file in group
            if file not in set(kept)]  # fmt: skip
    return [*(file for group in newest for file in group), *rest]


def _placed(read: Sequence[Found]) -> list[Found]:
    """Return the files in order, with those that print no steps at the end.

    A job's error output, or the text of another rank, is often in a separate file. It is not known
    when its lines were printed. If the last ones report how the run ended, they belong to its last
    step; so the last lines of such files get that step.
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


def _settings(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        config = read_config(file)
    except DataError:
        if file.stat().st_size:
            notes.append(f"{file}: its settings cannot be read.")
        return {}
    # The config of a model has no settings of the run, although some names are the same.
    if "model_type" in config or "architectures" in config:
        return {}
    return flat({name: _unwrapped(value) for name, value in config.items() if name[:1] != "_"})


def _unwrapped(value: Any) -> Any:
    """Unwrap W&B's settings, which have the form {"value": ..., "desc": ...}."""
    if isinstance(value, Mapping) and "value" in value and value.keys() <= {"value", "desc"}:
        return value["value"]
    return value
