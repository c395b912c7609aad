"""The values that our own keys accept, in the form of health/frameworks/known.py."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from homeostat.config.loading.schema import walk_keys
from homeostat.config.run import RunConfig
from homeostat.health.frameworks.known import Kind

_PLAIN = {bool: "bool", int: "int", float: "float", str: "text"}


def own_kinds() -> dict[str, Kind]:
    """Every key of a recipe, and every section, with its kind."""
    found: dict[str, Kind] = {}
    for path, _, _, info in walk_keys(RunConfig):
        kind = _of_field(info)
        known = found.get(path)
        # The classes of a union have their `type` each: together they are the choices.
        both = isinstance(kind, tuple) and isinstance(known, tuple)
        found[path] = tuple(dict.fromkeys((*known, *kind))) if both else known or kind
        parts = path.replace("[]", "").split(".")
        for end in range(1, len(parts)):
            found.setdefault(".".join(parts[:end]), "table")
    return found


def _of_field(info: FieldInfo) -> Kind:
    return _kind(info.annotation)


def _kind(annotation: Any) -> Kind:
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0])
    if origin is Literal:
        return tuple(map(str, inner))
    if origin in (Union, types.UnionType):
        kinds = [_kind(one) for one in inner if one is not type(None)]
        return kinds[0] if all(kind == kinds[0] for kind in kinds) else _widest(kinds)
    return "list" if origin in (tuple, list, set, frozenset) else "table" if origin else "text"


def _widest(kinds: list[Kind]) -> Kind:
    return next((kind for kind in ("float", "int", "list", "table") if kind in kinds), "text")
