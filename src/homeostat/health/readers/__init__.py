"""Read logs, metric files and run folders of any framework into a RunView.

    open_run(path)     a file or a folder; if the folder has several runs, the newest
    runs_at(path)      the runs at a path: the path itself, or those in the folder
    runs_of_files(...) the runs that several files belong to, by their names
    read_text(text)    text that a user pasted
    read_stream(file)  standard input

Whatever the bytes are, the result is a view or a HomeostatError. Text that is not metrics is log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from homeostat.errors import DataError
from homeostat.health.readers.files.one_file import found_in_named, found_in_stream, found_in_text
from homeostat.health.readers.input.packed import unpacked
from homeostat.health.readers.input.source import Source
from homeostat.health.readers.places.own_runs import is_our_run
from homeostat.health.readers.places.run_dir import view_of_run
from homeostat.health.readers.places.run_places import RunPlace, runs_at, runs_in, runs_of_files
from homeostat.health.readers.values.settings import read_config
from homeostat.health.readers.views.build import Found, view_of
from homeostat.health.reading import Reading
from homeostat.health.view import RunView

__all__ = [
    "OUR_FILES",
    "Found",
    "RunPlace",
    "Source",
    "open_run",
    "read_stream",
    "read_text",
    "refuse_empty",
    "refuse_recipe",
    "runs_at",
    "runs_in",
    "runs_of_files",
    "unpacked",
    "view_of_run",
]

# Keys that each of our recipes has.
_RECIPE_KEYS = frozenset({"model", "data"})
# If one of these files in our run folder is given, the whole folder is read.
OUR_FILES = frozenset({"metrics.jsonl", "events.jsonl", "console.log", "config.json"})


def open_run(
    place: Path | RunPlace, *, config: Path | None = None, names: Mapping[str, str] | None = None
) -> RunView:
    """Read the run in a file or folder.

    `config` is a file with the run's settings, and `names` maps its names of metrics to ours.
    Raises HomeostatError.
    """
    settings = read_config(config) if config is not None else None
    path = place.path if isinstance(place, RunPlace) else place
    if path.is_dir():
        found = place if isinstance(place, RunPlace) else runs_at(path)[0]
        view = view_of_run(found.path, config=settings, only=found.files, names=names)
        return _with_notes(view, found.notes)
    if path.name in OUR_FILES and is_our_run(path.parent):
        return view_of_run(path.parent, config=settings, names=names)
    refuse_recipe(path)
    return view_of(found_in_named(path), config=settings, names=names)


def _with_notes(view: RunView, notes: tuple[str, ...]) -> RunView:
    """Return the view with these notes added to its reading."""
    if not notes:
        return view
    reading: Reading = view.facts["reading"]
    noted = replace(reading, notes=(*reading.notes, *notes))
    return replace(view, facts={**view.facts, "reading": noted})


def read_stream(
    source: Source,
    *,
    config: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
) -> RunView:
    """Read the run that a stream describes, up to where the stream can be read."""
    return view_of(found_in_stream(source), config=config, names=names)


def refuse_empty(view: RunView, *, name: str) -> None:
    """Raise DataError if nothing was read, so that an empty log is not reported as healthy.

    One of our folders is never empty: it has the settings of the run.
    """
    reading: Reading = view.facts["reading"]
    is_read = reading.num_lines or reading.num_rows or reading.num_unread_rows or view.log.lines
    if is_read or view.metrics or view.settings or view.events:
        return
    raise DataError(
        f"{name}: is empty. Either nothing has been written yet, or the run prints to another "
        "file; a cluster job often writes errors to a separate file (.err)."
    )


def refuse_recipe(path: Path) -> None:
    """Raise DataError if a file contains settings and no log: there is no run to judge."""
    if path.suffix not in {".yaml", ".yml", ".toml"} or not path.is_file():
        return
    try:
        settings = read_config(path)
    except DataError:
        return
    if settings.keys() >= _RECIPE_KEYS:
        raise DataError(
            f"{path}: this is a recipe, not a log: there is no run to judge yet. Use "
            f"`homeostat check {path}` for a recipe, and give the doctor the run's folder or log."
        )
    raise DataError(
        f"{path}: these are settings, not a log. Give the doctor the run's log, and this file with "
        "--config."
    )


def read_text(text: str, *, config: Mapping[str, Any] | None = None, name: str = "-") -> RunView:
    """Read the run that a text describes: a log, rows, JSON lines or a table."""
    return view_of(found_in_text(text, name=name), config=config)
