"""Folders of other frameworks: every known file in them, joined.

Of a metric that several files have, the one that most is known of counts; the trainer's own state
goes before a log, whose rows may have no steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from homeostat.errors import DataError
from homeostat.health.log import Log, LogLine
from homeostat.health.readers.build import Found
from homeostat.health.readers.files import found_in_file
from homeostat.health.readers.settings import flat, read_config

_MAX_DEPTH = 4
_MAX_ENTRIES = 5_000
_MAX_FILES = 40
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
_NOT_METRICS = ("dataset", "data", "train.jsonl", "test.jsonl", "completions", "samples")


def found_in_folder(path: Path) -> Found:
    """What all known files of a folder hold. Raises DataError where it cannot be listed."""
    files = list(_files(path))
    merged = Found()
    for file in _chosen(files):
        try:
            _merge(merged, found_in_file(file))
        except DataError:
            # One file that cannot be read says nothing about the others.
            continue
    for file in sorted(file for file in files if file.name in _CONFIGS):
        settings = _settings(file)
        if settings:
            merged.settings = {**merged.settings, **settings}
            merged.sources.append(str(file))
    return merged


def _files(path: Path) -> Iterator[Path]:
    num_seen = 0
    for folder, folders, names in os.walk(path):
        depth = len(Path(folder).relative_to(path).parts)
        folders[:] = sorted(folders)[:200] if depth < _MAX_DEPTH else []
        for name in sorted(names):
            num_seen += 1
            if num_seen > _MAX_ENTRIES:
                return
            yield Path(folder) / name


def _chosen(files: list[Path]) -> list[Path]:
    """The files to read, in the order in which they are believed."""
    states = [file for file in files if file.name == "trainer_state.json"]
    groups = [
        sorted(states, key=_modified)[-1:],
        [file for file in files if file.suffix == ".jsonl" and not _is_data(file)],
        [file for file in files if file.suffix == ".csv" and not _is_data(file)],
        [file for file in files if "tfevents" in file.name],
        [file for file in files if file.suffix == ".wandb"],
        [file for file in files if file.suffix in {".log", ".out", ".err"} and not _is_own(file)],
        [file for file in files if file.name in {"log.txt", "train_log.txt", "output.txt"}],
    ]
    return [file for group in groups for file in group][:_MAX_FILES]


def _is_data(file: Path) -> bool:
    return any(word in file.name.lower() for word in _NOT_METRICS)


def _is_own(file: Path) -> bool:
    """Whether a log is the tracker's about itself."""
    return file.name.startswith("debug") and "wandb" in file.parts


def _modified(file: Path) -> tuple[float, str]:
    try:
        return file.stat().st_mtime, str(file)
    except OSError:
        return 0.0, str(file)


def _merge(merged: Found, found: Found) -> None:
    for name, series in found.series.items():
        known = merged.series.get(name)
        if known is None or len(series) > _MORE * len(known):
            merged.series[name] = series
    for form, count in found.forms.items():
        merged.forms[form] = merged.forms.get(form, 0) + count
    merged.settings = {**found.settings, **merged.settings}
    merged.decimals = {**found.decimals, **merged.decimals}
    merged.summary = {**found.summary, **merged.summary}
    merged.events.extend(found.events)
    merged.samples.extend(found.samples)
    merged.runs = merged.runs or found.runs
    merged.total_steps = merged.total_steps or found.total_steps
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
    # The description of a model is no setting of the run, though names are the same.
    if "model_type" in config or "architectures" in config:
        return {}
    return flat({name: _unwrapped(value) for name, value in config.items() if name[:1] != "_"})


def _unwrapped(value: Any) -> Any:
    """W&B writes every setting as {"value": ..., "desc": ...}."""
    if isinstance(value, Mapping) and "value" in value and value.keys() <= {"value", "desc"}:
        return value["value"]
    return value
