"""Change one key of a config and check the result like any other config."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from homeostat.config.base import Settings
from homeostat.config.combinations.check import find_conflicts
from homeostat.config.run import RunConfig
from homeostat.errors import ConfigError, Problem

AnySettings = TypeVar("AnySettings", bound=Settings)


def edited(config: RunConfig, path: str, value: Any) -> RunConfig:
    """Return the config with one key changed.

    Raises ConfigError if the key cannot have the value, alone or together with the other keys.
    """
    try:
        found = _with(config, path.split("."), value)
    except ValidationError as error:
        why = error.errors(include_url=False)[0]["msg"]
        raise ConfigError([Problem(path, f"it cannot be {value!r}: {why}.")]) from None
    if problems := find_conflicts(found, is_edited=True):
        raise ConfigError(problems)
    return found


def value_at(config: RunConfig, path: str) -> Any:
    """Return the value at a dotted path, or None if it, or a section above it, is missing."""
    here: Any = config
    for part in path.split("."):
        here = getattr(here, part, None)
    return here


def _with(settings: AnySettings, path: list[str], value: Any) -> AnySettings:
    name, rest = path[0], path[1:]
    new = value
    if rest:
        section = getattr(settings, name)
        if section is None:
            raise ConfigError([Problem(name, "this section is null, and has no keys.")])
        new = _with(section, rest, value)
    kind: type[Settings] = type(settings)
    fields = {field: getattr(settings, field) for field in kind.model_fields}
    checked = kind.model_validate({**fields, name: new})
    # model_copy keeps track of which keys the recipe set and which are defaults.
    return settings.model_copy(update={name: getattr(checked, name)})
