"""A config with one key changed, checked as any other."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from homeostat.config.base import Settings
from homeostat.config.combinations import find_conflicts
from homeostat.config.run import RunConfig
from homeostat.errors import ConfigError, Problem

AnySettings = TypeVar("AnySettings", bound=Settings)


def edited(config: RunConfig, path: str, value: Any) -> RunConfig:
    """Raises ConfigError where the key cannot have the value, alone or beside the others."""
    try:
        found = _with(config, path.split("."), value)
    except ValidationError as error:
        why = error.errors(include_url=False)[0]["msg"]
        raise ConfigError([Problem(path, f"it cannot be {value!r}: {why}.")]) from None
    if problems := find_conflicts(found):
        raise ConfigError(problems)
    return found


def value_at(config: RunConfig, path: str) -> Any:
    """None also where a section on the way is not there."""
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
    fields = {field: getattr(settings, field) for field in type(settings).model_fields}
    checked = type(settings).model_validate({**fields, name: new})
    # A copy, so that what the recipe said and what are defaults stays told apart.
    return settings.model_copy(update={name: getattr(checked, name)})
