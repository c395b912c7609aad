"""Decide which config values may be shared, by an allow-list and not by the names of keys.

A secret can be stored under any name (`judge_key`, `pw`, `url`), so a value is shown only if its
key declares what it can be:

    numbers, booleans, null    shown
    words                      shown if the key's type is a choice between them, if they are the
                               key's default, or if the key says `share=True`
    paths                      only their last part
    everything else            <removed>: free text, and everything in a dict that is passed to
                               the user's own code

`private_values` lists the texts that are not shown, so that logs can be searched for them.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from homeostat.config.base import PathText, Settings, check_path
from homeostat.config.loading.schema import settings_at, settings_types
from homeostat.config.loading.yaml_file import Place
from homeostat.config.run import RunConfig
from homeostat.errors import REMOVED

_PLAIN = (bool, int, float, type(None))
# The class that owns the keys at a place of one config.
OwnerAt = Callable[[Place], type[BaseModel] | None]


def shared_config(raw: Any) -> Any:
    """Return a resolved config as JSON values, with private values replaced."""
    # Each owner is found once for all its keys, because every run does this when it starts.
    return _shared(raw, (), cache(_owner_at(raw)))


def _shared(value: Any, place: Place, owner_at: OwnerAt) -> Any:
    info = _field(place, owner_at)
    if info is not None and _extra(info).get("share") == "all":
        return value
    if isinstance(value, dict) and (info is None or _is_dict(info)) and place:
        if info is None or not _shares(info):
            return dict.fromkeys(value, REMOVED)
        words = _words(info.annotation)
        return {name: _shared_option(item, words) for name, item in value.items()}
    if isinstance(value, dict):
        return {name: _shared(item, (*place, name), owner_at) for name, item in value.items()}
    if isinstance(value, list):
        return [_shared(item, (*place, index), owner_at) for index, item in enumerate(value)]
    return shared_value(value, info)


def shared_value(value: Any, info: FieldInfo | None) -> Any:
    """Return a single value of a key, or the mark that it was removed."""
    if info is None:
        return REMOVED
    if isinstance(value, _PLAIN):
        return value
    if not isinstance(value, str):
        return REMOVED
    if (
        (_shares(info) and not _is_dict(info))
        or value in _words(info.annotation)
        or value in _default(info)
    ):
        return value
    return PurePath(value).name or value if is_path(info) else REMOVED


def shared_override(text: str) -> str:
    """Return a `key=value` of the command line, with the value if that may be shown."""
    name, equals, value = text.partition("=")
    if not equals:
        return text
    is_plain = value in ("true", "false", "null") or _is_number(value)
    return text if is_plain and _declared(name) else f"{name}={_of_declared(name, value)}"


def shared_at(path: str, value: Any) -> Any:
    """Return the value of the key at a dotted path, as far as it may be shown."""
    return REMOVED if isinstance(value, (dict, list, tuple)) else _of_declared(path, value)


def _of_declared(path: str, value: Any) -> Any:
    shown = (shared_value(value, info) for info in _declared(path))
    return next((one for one in shown if one != REMOVED), REMOVED)


def private_values(raw: Any) -> Iterator[str]:
    """Return every text of a config that `shared_config` does not show in full."""
    yield from (text for text, _ in _private(raw, shared_config(raw)))


def private_paths(raw: Any) -> set[str]:
    """Return the private values that are paths and nothing else."""
    found = list(_private(raw, shared_config(raw)))
    hidden = {text for text, shown in found if not isinstance(shown, str) or shown == REMOVED}
    return {text for text, _ in found} - hidden


def _private(value: Any, shown: Any) -> Iterator[tuple[str, Any]]:
    """Yield each text that is not shown in full, and what is shown in its place."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _private(item, shown.get(name) if isinstance(shown, dict) else None)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _private(item, shown[index] if isinstance(shown, list) else None)
    elif isinstance(value, str) and value != shown:
        yield value, shown
    elif shown == REMOVED and not isinstance(value, _PLAIN[:1]):
        yield json.dumps(value), REMOVED


def is_private(place: Place, raw: Any) -> bool:
    """Return whether a value at this place belongs to the user's own code."""
    for length in range(len(place), 0, -1):
        info = _field(place[:length], _owner_at(raw))
        if info is not None:
            return _is_dict(info) and not _shares(info)
    return False


def is_path(info: FieldInfo) -> bool:
    """Return whether a field holds a path."""
    holds = any(getattr(part, "func", None) is check_path for part in info.metadata)
    return holds or PathText in get_args(info.annotation) or _extra(info).get("share") == "name"


def _shared_option(item: Any, words: set[Any]) -> Any:
    if isinstance(item, dict):
        return {name: _shared_option(inner, words) for name, inner in item.items()}
    if isinstance(item, list):
        return [_shared_option(inner, words) for inner in item]
    return item if isinstance(item, _PLAIN) or item in words else REMOVED


def _owner_at(raw: Any) -> OwnerAt:
    return lambda place: settings_at(RunConfig, place, raw)


def _field(place: Place, owner_at: OwnerAt) -> FieldInfo | None:
    """Return the declared field of a value; for an item of a list, the field of the list."""
    while place and isinstance(place[-1], int):
        place = place[:-1]
    if not place:
        return None
    owner = owner_at(place[:-1])
    return owner.model_fields.get(str(place[-1])) if owner is not None else None


def _declared(path: str) -> list[FieldInfo]:
    """Return the fields that a dotted path may mean; several members of a union may have one.

    A value inside a dict belongs to no declared key, unless the dict is shared.
    """
    owners: list[type[Settings]] = [RunConfig]
    found: list[FieldInfo] = []
    for part in path.split("."):
        if part.isdigit():
            continue
        fields = [owner.model_fields[part] for owner in owners if part in owner.model_fields]
        if not fields:
            return [info for info in found if _is_dict(info) and _shares(info)]
        found = fields
        owners = [inner for info in fields for inner in settings_types(info.annotation)]
    return found


def _is_dict(info: FieldInfo) -> bool:
    return any(get_origin(part) is dict for part in _parts(info.annotation))


def _shares(info: FieldInfo) -> bool:
    return _extra(info).get("share") is True


def _extra(info: FieldInfo) -> dict[str, Any]:
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}


def _words(annotation: Any) -> set[Any]:
    literals = (part for part in _parts(annotation) if get_origin(part) is Literal)
    return {word for literal in literals for word in get_args(literal)}


def _default(info: FieldInfo) -> tuple[Any, ...]:
    return info.default if isinstance(info.default, tuple) else (info.default,)


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield the annotation and those inside its unions, tuples and Annotated."""
    yield annotation
    if get_origin(annotation) in (Annotated, Union, types.UnionType, tuple, list, dict):
        for inner in get_args(annotation):
            yield from _parts(inner)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
