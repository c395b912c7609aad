"""Run folders of ours: recognise one, and find those further down in a folder.

A folder of ours holds a config.json with keys that only our settings have. The search is bounded in
depth and in entries, and enters neither hidden folders, nor checkpoints, nor a run that was found.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from homeostat.health.readers.settings import flat

MAX_DEPTH = 4
# Entries of folders that a search for runs looks at.
_MAX_ENTRIES = 200_000
_MAX_CONFIG = 8_000_000
# Keys that the resolved settings of each of our runs have.
_OUR_KEYS = frozenset({"algorithm", "runs_dir", "trainer"})
# Folders that hold no runs, and may hold very many files.
_NOT_ENTERED = (".", "checkpoint", "global_step", "node_modules", "site-packages", "__pycache__")


def our_config(path: Path) -> dict[str, Any] | None:
    """Return the settings of a run of ours, with dots; None if the folder is not ours."""
    file = path / "config.json"
    try:
        if not file.is_file() or file.stat().st_size > _MAX_CONFIG:
            return None
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not document.keys() >= _OUR_KEYS:
        return None
    return flat(document)


def is_our_run(path: Path) -> bool:
    return our_config(path) is not None


def our_runs_below(path: Path) -> list[Path]:
    """Return the run folders of ours below a folder, each once, whatever links to it."""
    found: list[Path] = []
    seen = {os.path.realpath(path)}
    waiting, num_seen = [(path, 0)], 0
    while waiting:
        folder, depth = waiting.pop(0)
        inner: list[tuple[bool, str]] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    num_seen += 1
                    if num_seen > _MAX_ENTRIES:
                        break
                    if not entry.name.startswith(_NOT_ENTERED) and entry.is_dir():
                        inner.append((entry.is_symlink(), entry.name))
        except OSError:
            # It cannot be listed, or was removed meanwhile.
            continue
        # Links come last, so that a run is found under its own name.
        for _, name in sorted(inner):
            child = folder / name
            place = os.path.realpath(child)
            if place in seen:
                continue
            seen.add(place)
            if is_our_run(child):
                found.append(child)
            elif depth + 1 < MAX_DEPTH:
                waiting.append((child, depth + 1))
    return found
