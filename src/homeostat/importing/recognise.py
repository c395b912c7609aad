"""Recognise which framework a file of settings belongs to, and find our keys for its names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from homeostat.health.frameworks import ALL, Framework
from homeostat.health.frameworks.known import known
from homeostat.health.frameworks.telling import lineage
from homeostat.health.readers.values.settings import fold_setting
from homeostat.importing.entries import ForeignFile

# Frameworks whose files can be converted. If two know equally many names, the earlier is taken.
IMPORTABLE = ("verl", "slime", "miles", "openrlhf", "axolotl", "llama_factory", "trl")
# A file with fewer known names is not recognised.
MIN_NAMES = 3
_INDEX = re.compile(r"\[\d+\]")


def fold(name: str) -> str:
    """Return a name without dashes in front and without the places in lists."""
    return _INDEX.sub("[]", fold_setting(name))


@cache
def keys_by_name(framework: str) -> dict[str, tuple[str, ...]]:
    """Return their name -> our keys, in the order of the framework's tables."""
    found: dict[str, dict[str, None]] = {}
    for table in lineage(ALL[framework]):
        for key, names in table.settings.items():
            for name in names:
                found.setdefault(fold(name), {})[key] = None
    return {name: tuple(keys) for name, keys in found.items()}


@cache
def _all_names(framework: str) -> frozenset[str]:
    named = map(fold, known(framework).settings or {})
    return frozenset({*named, *keys_by_name(framework), *ALL[framework].flags})


def recognise(file: ForeignFile, *, name: str | None = None) -> Framework | None:
    """Return the framework that knows the most of a file's names; None if none knows enough.

    `name` is the framework that the user names.
    """
    if name is not None:
        return ALL[name]
    names = {fold(given.name) for given in file.settings}
    ranks = {name: _rank(name, names, file.text) for name in IMPORTABLE}
    best = max(IMPORTABLE, key=lambda name: ranks[name])
    return ALL[best] if ranks[best][0] >= min(MIN_NAMES, max(1, len(names))) else None


def _rank(framework: str, names: Iterable[str], text: str) -> tuple[int, int]:
    """Return how many names it knows, and how often the text names the framework itself."""
    num_known = sum(name in _all_names(framework) for name in names)
    marks = sum(text.count(mark) for mark in ALL[framework].marks)
    return num_known, marks + text.lower().count(framework)
