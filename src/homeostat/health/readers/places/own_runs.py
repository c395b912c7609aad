"""Recognise our run folders, and find those below a folder.

Our run folders have a config.json with keys that only our settings have. The search is limited in
depth and in the number of entries. It does not enter hidden folders, checkpoints, or run folders.
"""

from __future__ import annotations

import os
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

from homeostat.health.readers.values.settings import flat
from homeostat.json_text import parse_json

MAX_DEPTH = 4
# Maximum number of folder entries that a search for runs looks at.
_MAX_ENTRIES = 200_000
_MAX_CONFIG = 8_000_000
# Keys that the resolved settings of each of our runs have.
_OUR_KEYS = frozenset({"algorithm", "runs_dir", "trainer"})
# Folders that contain no runs, and may contain very many files.
_NOT_ENTERED = (".", "checkpoint", "global_step", "node_modules", "site-packages", "__pycache__")


def our_config(path: Path) -> dict[str, Any] | None:
    """Return the settings of one of our runs, with dotted names; None if the folder is not ours."""
    file = path / "config.json"
    try:
        if not file.is_file() or file.stat().st_size > _MAX_CONFIG:
            return None
        document = parse_json(file.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict) or not document.keys() >= _OUR_KEYS:
        return None
    return flat(document)


def is_our_run(path: Path) -> bool:
    return our_config(path) is not None


def our_runs_below(path: Path) -> list[Path]:
    """Return our run folders below a folder, each once, even if links also lead to it."""
    found: list[Path] = []
    seen: set[str] = set()
    waiting, num_left = deque([(path, 0)]), _MAX_ENTRIES
    # Links are followed last, so that a run is found under its own name.
    links: deque[tuple[Path, int]] = deque()
    while waiting or links:
        folder, depth = waiting.popleft() if waiting else links.popleft()
        place = os.path.realpath(folder)
        if place in seen:
            continue
        seen.add(place)
        if depth and is_our_run(folder):
            found.append(folder)
        elif depth < MAX_DEPTH and num_left > 0:
            entries = _entries(folder, most=num_left)
            num_left -= len(entries)
            inner = [one for one in entries if not one.name.startswith(_NOT_ENTERED)]
            for entry in sorted(inner, key=lambda one: one.name):
                if _is_folder(entry):
                    to = links if entry.is_symlink() else waiting
                    to.append((Path(entry.path), depth + 1))
    return found


def _entries(folder: Path, *, most: int) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; [] if it cannot be listed or was removed meanwhile."""
    try:
        with os.scandir(folder) as entries:
            return list(islice(entries, most))
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # The links form a loop, or lead to a place without permission.
        return False
