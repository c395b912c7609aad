"""Plug-ins: the user's classes in place of built-in ones, named by the key `type`.

    type: package.module:Name    a class of an installed package, or of the working folder
    type: ./file.py:Name         a class of a file, beside the recipe or in the current folder
    type: name                   an entry point of the group, such as homeostat.algorithms

The class is a config class like the built-in ones, with further keys, and has the functions that
a built-in one is given by a registry. It is imported only if a recipe names it. The key `type` of a
resolved recipe holds the full path of a file, so that every process finds it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from homeostat.config.base import Settings, key
from homeostat.errors import HomeostatError, PluginError
from homeostat.user_code import absolute, is_file, is_reference, load_object

# The tag of a union's member that stands for all plug-ins. No recipe contains it.
PLUGIN = "(plug-in)"
# The kind of error that pydantic reports if a plug-in cannot be used.
UNUSABLE = "plugin_unusable"
# Entry points of plug-ins, by what they are.
GROUPS = {
    "algorithm": "homeostat.algorithms",
    "reward": "homeostat.rewards",
    "source": "homeostat.sources",
    "engine": "homeostat.engines",
    "transport": "homeostat.transports",
    "rule": "homeostat.rules",
}
# Their base classes in homeostat.plugins.
_BASES = {
    "algorithm": "Algorithm or PreferenceAlgorithm",
    "reward": "Reward",
    "source": "Prompts, Messages, Completions, Texts or Preferences",
    "engine": "Engine",
    "transport": "Transport",
}
# Where a recipe may name them by `type`; [] stands for every item of a list.
PLACES = (
    ("algorithm",),
    ("engine",),
    ("sync", "transport"),
    ("rewards", "functions", "[]"),
    ("data", "train", "[]"),
    ("data", "validation", "[]"),
)

# The plug-ins that this process has loaded: (noun, reference) -> object.
_LOADED: dict[tuple[str, str], Any] = {}


class Plugged(Settings):
    """Base of the config classes of plug-ins. `noun` is a key of GROUPS."""

    type: str = key(share="name", help="Import path of the class, or name of its entry point.")

    @classmethod
    def noun(cls) -> str:
        """Return what kind of plug-in it is."""
        raise NotImplementedError

    @classmethod
    def find_defect(cls) -> str:
        """Return what the class lacks to be used; empty if nothing."""
        return ""

    @classmethod
    def own_keys(cls) -> list[str]:
        """Return the keys that the plug-in brings, beside those of its kind."""
        shared = {name for base in cls.__mro__[1:] if _is_ours(base) for name in _fields(base)}
        return [name for name in cls.model_fields if name not in shared and name != "type"]

    @classmethod
    def needs(cls) -> str:
        """Say what the plug-in needs of a run, for `homeostat check`; empty if nothing."""
        return ""

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process may not have loaded the class yet: it is found by its import path.
        return _restored, (self.noun(), self.type, self.model_dump_json())


def _is_ours(base: type) -> bool:
    return issubclass(base, Settings) and base.__module__.startswith("homeostat.")


def _fields(base: Any) -> Any:
    return base.model_fields


def _restored(noun: str, reference: str, text: str) -> Any:
    return load_plugin(noun, reference).model_validate_json(text)


def load_plugin(noun: str, reference: str) -> Any:
    """Return what a recipe names. Raises PluginError, which names the plug-in."""
    try:
        found = _find(noun, reference)
    except HomeostatError as error:
        raise PluginError(f"the {noun} {reference!r} cannot be used: {error}.") from error
    except Exception as error:
        why = f"importing it raised {type(error).__name__}: {error}"
        raise PluginError(f"the {noun} {reference!r} cannot be used: {why}.") from error
    _LOADED[noun, reference] = found
    return found


def plugin_named(noun: str, reference: str) -> Any:
    """Return a plug-in as it was loaded last; if this process has none of that name, load it."""
    found = _LOADED.get((noun, reference))
    return load_plugin(noun, reference) if found is None else found


def loaded_settings(reference: str, *, kinds: tuple[type[Settings], ...]) -> type[Settings] | None:
    """Return the config class of a plug-in that was loaded before; nothing is imported."""
    for (_, known), found in _LOADED.items():
        if known == reference and isinstance(found, type) and issubclass(found, Plugged):
            if any(issubclass(found, _shared_base(kind)) for kind in kinds):
                return found
    return None


def _shared_base(kind: type[Settings]) -> type[Settings]:
    """Return the class below Settings from which a member of a union derives."""
    line = [base for base in kind.__mro__ if issubclass(base, Settings) and base is not Settings]
    return line[-1]


def _find(noun: str, reference: str) -> Any:
    if not is_reference(reference):
        return _entry_point(noun, reference).load()
    if is_file(reference) and not Path(reference.rpartition(":")[0]).is_absolute():
        # A recipe's own paths are made absolute when it is loaded; this comes from elsewhere.
        raise PluginError("the path of its file must be absolute here")
    return load_object(reference)


def _entry_point(noun: str, name: str) -> EntryPoint:
    group = GROUPS[noun]
    found = tuple(entry_points(group=group, name=name))
    if not found:
        raise PluginError(f"no installed package has an entry point {name!r} of the group {group}")
    if len({one.value for one in found}) > 1:
        values = ", ".join(sorted(one.value for one in found))
        raise PluginError(f"several packages have an entry point {name!r}: {values}")
    return found[0]


def is_entry_point(noun: str, name: str) -> bool:
    """Return whether an installed package offers a plug-in of this name. Imports nothing."""
    return bool(tuple(entry_points(group=GROUPS[noun], name=name)))


@dataclass(frozen=True, slots=True)
class Pluggable:
    """An annotation of a union by `type`: a plug-in derived from a base is one more member."""

    noun: str
    bases: tuple[type[Plugged], ...]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        inner = handler(source)
        assert inner["type"] == "tagged-union", f"a union by type, not {inner['type']}"
        known = set(inner["choices"])
        one_more = core_schema.no_info_plain_validator_function(
            self._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(_dumped, info_arg=True),
        )
        return core_schema.tagged_union_schema(
            {**inner["choices"], PLUGIN: one_more},
            discriminator=lambda value: self._tag(value, known),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        built_in = handler(schema)
        tags = (_tag_of(handler.resolve_ref_schema(one)) for one in built_in["oneOf"])
        mapping = {tag: one["$ref"] for tag, one in zip(tags, built_in["oneOf"], strict=True)}
        built_in["discriminator"] = {"mapping": mapping, "propertyName": "type"}
        named = {"type": "object", "properties": {"type": {"type": "string", "pattern": ":"}}}
        note = f"A plug-in: your {self.noun}, by its import path."
        return {"anyOf": [built_in, {**named, "required": ["type"], "description": note}]}

    def _tag(self, value: Any, known: set[str]) -> str | None:
        if isinstance(value, Plugged):
            return PLUGIN
        tag = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if not isinstance(tag, str) or tag in known:
            return tag
        return PLUGIN if is_reference(tag) or is_entry_point(self.noun, tag) else tag

    def _validate(self, value: Any) -> Plugged:
        if isinstance(value, self.bases):
            return value
        reference = value["type"]
        try:
            found = load_plugin(self.noun, reference)
            _require(found, self.bases, noun=self.noun, reference=reference)
        except PluginError as error:
            raise PydanticCustomError(UNUSABLE, "{why}", {"why": str(error)}) from error
        return found.model_validate_json(json.dumps(value))


def _dumped(settings: Plugged, info: core_schema.SerializationInfo) -> dict[str, Any]:
    return settings.model_dump(
        mode=info.mode, exclude_unset=info.exclude_unset, exclude_defaults=info.exclude_defaults
    )


def _tag_of(schema: dict[str, Any]) -> str:
    """Return the type of a union's member from its JSON Schema."""
    return schema["properties"]["type"]["const"]


def _require(found: Any, bases: tuple[type[Plugged], ...], *, noun: str, reference: str) -> None:
    lacks = ""
    if not isinstance(found, type) or not issubclass(found, bases):
        lacks = f"it is no class derived from homeostat.plugins.{_BASES[noun]}"
    elif found.__abstractmethods__:
        lacks = f"it does not define {', '.join(sorted(found.__abstractmethods__))}"
    elif defect := found.find_defect():
        lacks = defect
    if lacks:
        raise PluginError(f"the {noun} {reference!r} cannot be used: {lacks}.")


def with_absolute_files(raw: dict[str, Any], *, folder: Path) -> None:
    """Write the full paths of plug-ins' files into a raw recipe that belongs to `folder`."""
    for place in PLACES:
        for section in _sections(raw, place):
            if isinstance(reference := section.get("type"), str):
                section["type"] = absolute(reference, folder=folder)
    health = raw.get("health")
    rules = health.get("rules") if isinstance(health, dict) else None
    if isinstance(health, dict) and isinstance(rules, list):
        health["rules"] = [
            absolute(one, folder=folder) if isinstance(one, str) else one for one in rules
        ]


def _sections(raw: Any, place: tuple[str, ...]) -> list[dict[str, Any]]:
    if not place:
        return [raw] if isinstance(raw, dict) else []
    if place[0] == "[]":
        items = raw if isinstance(raw, list) else []
        return [found for item in items for found in _sections(item, place[1:])]
    return _sections(raw.get(place[0]), place[1:]) if isinstance(raw, dict) else []
