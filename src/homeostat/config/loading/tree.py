"""Helpers for raw recipes: nested dicts and lists, before validation."""

from __future__ import annotations

import copy
from typing import Any

from homeostat.config.loading.yaml_file import Place

_ABSENT = object()


def child(raw: Any, part: str | int, default: Any = None) -> Any:
    """Return the item of a dict or list, or the default if there is none."""
    if isinstance(raw, dict):
        return raw.get(part, default)
    if isinstance(raw, list) and isinstance(part, int) and part < len(raw):
        return raw[part]
    return default


def is_index(part: str) -> bool:
    """Return whether a text is a plain list index: no superscript, not a thousand digits long."""
    return part.isascii() and part.isdigit() and len(part) < 10


def parts(place: str) -> Place:
    """Split a dotted path into its names."""
    return tuple(int(part) if is_index(part) else part for part in place.split("."))


def has(raw: Any, place: str) -> bool:
    """Return whether a raw recipe has a value at this place."""
    for part in parts(place):
        raw = child(raw, part, _ABSENT)
    return raw is not _ABSENT


def without(raw: dict[str, Any], places: list[Place]) -> dict[str, Any]:
    """Return a copy that lacks the keys at these places."""
    pruned = copy.deepcopy(raw)
    for place in places:
        here: Any = pruned
        for part in place[:-1]:
            here = child(here, part)
        if place and isinstance(here, dict):
            here.pop(str(place[-1]), None)
    return pruned


def fill(above: dict[str, Any], below: dict[str, Any]) -> dict[str, Any]:
    """Return `above`, with missing values taken from `below`."""
    result = copy.deepcopy(below)
    for name, value in above.items():
        under = result.get(name)
        both = isinstance(value, dict) and isinstance(under, dict)
        result[name] = fill(value, under) if both else value  # type: ignore[arg-type]
    return result
