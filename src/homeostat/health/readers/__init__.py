"""Logs, metric files and run folders of any framework -> RunView.

    open_run(path)     a file or a folder
    read_text(text)    what a user pasted

Whatever the bytes are, the answer is a view or a HomeostatError: what is not metrics is log.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from homeostat.health.readers.build import Found, view_of
from homeostat.health.readers.files import found_in_file, found_in_text
from homeostat.health.readers.run_dir import is_our_run, view_of_run
from homeostat.health.readers.settings import read_config
from homeostat.health.view import RunView

__all__ = ["Found", "open_run", "read_text", "view_of_run"]

# A file of a run folder of ours stands for the folder.
_OUR_FILES = frozenset({"metrics.jsonl", "events.jsonl", "console.log", "config.json"})


def open_run(path: Path, *, config: Path | None = None) -> RunView:
    """The run in a file or folder. `config` is a file with its settings. Raises HomeostatError."""
    settings = read_config(config) if config is not None else None
    if path.is_dir():
        return view_of_run(path, config=settings)
    if path.name in _OUR_FILES and is_our_run(path.parent):
        return view_of_run(path.parent, config=settings)
    return view_of(found_in_file(path), config=settings)


def read_text(text: str, *, config: Mapping[str, Any] | None = None, name: str = "-") -> RunView:
    """The run that a text tells of: a log, rows, JSON lines or a table."""
    return view_of(found_in_text(text, name=name), config=config)
