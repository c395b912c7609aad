"""List all config keys: as a JSON Schema for editors, and by walking the config classes."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from homeostat.config.base import Settings
from homeostat.config.loading.tree import child
from homeostat.config.loading.yaml_file import Place
from homeostat.config.plugins import loaded_settings
from homeostat.config.run import RunConfig


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe, for editors that complete and check YAML."""
    schema = RunConfig.model_json_schema(mode="validation")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "homeostat recipe"
    preset = schema["properties"]["preset"]
    schema["properties"]["preset"] = {
        "description": preset["description"],
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return schema


def settings_types(annotation: Any) -> list[type[Settings]]:
    """Return the Settings classes inside an annotation, through Annotated, unions and tuples."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    if get_origin(annotation) in (Annotated, Union, types.UnionType, tuple, list):
        inner = get_args(annotation)
        return [found for part in inner for found in settings_types(part)]
    return []


def has_plain_value(annotation: Any) -> bool:
    """Return whether a key takes a plain value, such as a number, besides nested keys."""
    if get_origin(annotation) is Annotated:
        return has_plain_value(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return any(has_plain_value(part) for part in get_args(annotation))
    return annotation in (bool, int, float, str)


def walk_keys(
    model: type[Settings], prefix: str = ""
) -> Iterator[tuple[str, type[Settings], str, FieldInfo]]:
    """Yield every leaf key: dotted path, owning class, field name, field. Lists show as `[]`."""
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        children = settings_types(info.annotation)
        if not children or has_plain_value(info.annotation):
            yield path, model, name, info
        dots = "[]." if get_origin(info.annotation) is tuple else "."
        for inner in children:
            yield from walk_keys(inner, path + dots)


def known_keys(model: type[Settings]) -> list[str]:
    """Return the dotted paths of all leaf keys, sorted."""
    return sorted({path for path, *_ in walk_keys(model)})


def settings_at(model: type[Settings], place: Place, raw: Any) -> type[BaseModel] | None:
    """Return the config class that owns the keys at `place`; a raw `type` resolves unions."""
    current: type[Settings] | None = model
    candidates: list[type[Settings]] = []
    for part in place:
        raw = child(raw, part)
        if not isinstance(part, int):
            info = current.model_fields.get(part) if current is not None else None
            candidates = settings_types(info.annotation) if info is not None else []
        # Each item of a list has its own type; the list itself has none.
        current = _chosen(candidates, raw)
    return current


def is_of_names(place: Place, raw: Any) -> bool:
    """Return whether a key is a mapping of names to plain values; a name may have dots."""
    info = _field(place, raw)
    if info is None or get_origin(info.annotation) is not dict:
        return False
    value = get_args(info.annotation)[1]
    return value is not Any and get_origin(value) is not dict


def types_at(place: Place, raw: Any) -> list[str]:
    """Return the types that the section at `place`, or this item of a list, may have."""
    while place and isinstance(place[-1], int):
        place = place[:-1]
    info = _field(place, raw)
    classes = settings_types(info.annotation) if info is not None else []
    fields = [one.model_fields["type"] for one in classes if "type" in one.model_fields]
    return [get_args(field.annotation)[0] for field in fields]


def _field(place: Place, raw: Any) -> FieldInfo | None:
    owner = settings_at(RunConfig, place[:-1], raw) if place else None
    return owner.model_fields.get(str(place[-1])) if owner is not None else None


def _chosen(candidates: list[type[Settings]], raw: Any) -> type[Settings] | None:
    tag = raw.get("type") if isinstance(raw, dict) else None
    for candidate in candidates:
        field = candidate.model_fields.get("type")
        if field is not None and tag in get_args(field.annotation):
            return candidate
    if isinstance(tag, str) and (plugin := loaded_settings(tag, kinds=tuple(candidates))):
        return plugin
    return candidates[0] if candidates else None
