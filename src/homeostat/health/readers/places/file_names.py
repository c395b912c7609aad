"""Recognise the files of a run by their names: logs, metrics, settings, and other files."""

from __future__ import annotations

import os
from pathlib import Path

from homeostat.health.readers.input.packed import plain_name
from homeostat.health.readers.places.loose_logs import LOG_SUFFIXES, is_rotated

LOG_NAMES = frozenset({"log.txt", "train_log.txt", "output.txt"})
# Files with settings that are stored beside a run's logs.
CONFIGS = frozenset(
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
_LOG_STARTS = ("stdout", "stderr")
_ROWS = (".jsonl", ".csv")
# Parts of the names of files that have no metrics: rows, texts, or the doctor's own output.
_NOT_METRICS = (
    "dataset", "data", "train.jsonl", "test.jsonl", "completions", "samples", "homeostat_findings",
)  # fmt: skip


def is_wanted(name: str) -> bool:
    """Return whether a file with this name is a log or has metrics."""
    return is_of_trainer(name) or name.endswith(_ROWS) or is_console(name)


def is_of_trainer(name: str) -> bool:
    """Return whether only a trainer or a tracker writes files with this name."""
    return name == "trainer_state.json" or name.endswith(".wandb") or "tfevents" in name


def is_rows(name: str) -> bool:
    """Return whether a file with this name has rows, which may be metrics or training data."""
    return name.endswith(_ROWS)


def is_console(name: str) -> bool:
    """Return whether a file with this name is a console log."""
    name = plain_name(name)
    return (
        name.endswith(LOG_SUFFIXES)
        or is_rotated(name)
        or name in LOG_NAMES
        or (name.startswith(_LOG_STARTS) and not name.endswith((*_ROWS, ".wandb")))
    )


def is_suffixed(file: Path) -> bool:
    """Return whether a name ends like that of a console log, rotated or not."""
    return plain_name(file.name).endswith(LOG_SUFFIXES) or is_rotated(file.name)


def is_redirected(file: Path) -> bool:
    """Return whether a name is that of redirected output: stdout.txt, stderr and similar."""
    is_other = is_suffixed(file) or file.suffix in _ROWS
    return file.name.startswith(_LOG_STARTS) and not is_other


def is_named_data(file: Path) -> bool:
    """Return whether the name shows that the rows of a file are not metrics."""
    return any(word in file.name.lower() for word in _NOT_METRICS)


def is_own(file: Path) -> bool:
    """Return whether a log is a tracker's log about itself."""
    return file.name.startswith("debug") and "wandb" in file.parts


def is_regular(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        # The symbolic links form a loop.
        return False


def modified(file: Path) -> tuple[float, str]:
    """Return a key that sorts files by the time of their last change."""
    try:
        return file.stat().st_mtime, str(file)
    except OSError:
        return 0.0, str(file)
