"""Find the files that a recipe names: beside the recipe, or else in the current folder.

A recipe that was copied together with its data works from any folder. What a run writes
(`runs_dir`, caches) belongs to the current folder, and so do paths on the command line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from homeostat.config.loading.schema import walk_keys
from homeostat.config.loading.shareable import is_path
from homeostat.config.run import RunConfig

# Keys with paths of files that a run writes.
_WRITTEN = frozenset(
    {
        "runs_dir",
        "data.cache_dir",
        "sync.transport.folder",
        "observe.sinks[].folder",
        "observe.profiler.folder",
    }
)


@cache
def input_keys() -> frozenset[str]:
    """Return the keys that name files to read; items of lists show as `[]`."""
    found = {path for path, _, _, info in walk_keys(RunConfig) if is_path(info)}
    return frozenset(found - _WRITTEN)


def placed(raw: Any, folder: Path) -> Any:
    """Return a raw recipe in which relative paths that exist in `folder` begin with it."""
    return _placed(raw, folder, "")


def input_paths(raw: Any) -> Iterator[str]:
    """Yield the paths of all files that a raw recipe reads."""
    yield from _inputs(raw, "")


def not_there(path: str | Path) -> str:
    """Return the sentences about a file or folder that does not exist, with its full path."""
    told = f"{os.path.abspath(path)} does not exist."
    if os.path.isabs(path):
        return told
    return (
        f"{told} A relative path in a recipe is looked for beside the recipe, then in the folder "
        "in which the command was started."
    )


def _inputs(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _inputs(one, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for one in value:
            yield from _inputs(one, f"{key}[]")
    elif isinstance(value, str) and key in input_keys():
        yield value


def _placed(value: Any, folder: Path, key: str) -> Any:
    if isinstance(value, dict):
        inner = f"{key}." if key else ""
        return {name: _placed(one, folder, f"{inner}{name}") for name, one in value.items()}
    if isinstance(value, list):
        return [_placed(one, folder, f"{key}[]") for one in value]
    if isinstance(value, str) and key in input_keys():
        return _beside(value, folder)
    return value


def _beside(text: str, folder: Path) -> str:
    """Return a path with the folder before it, if that exists. A function may follow a colon."""
    file, colon, function = text.rpartition(":") if ".py:" in text else (text, "", "")
    # exists() of os.path takes any text; an absolute path is itself again.
    is_there = file.strip() and os.path.exists(folder / file)
    return f"{folder / file}{colon}{function}" if is_there else text
