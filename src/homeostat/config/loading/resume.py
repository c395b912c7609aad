"""Decide whether a run directory can be resumed with a changed config.

The resume class of each changed key decides.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from homeostat.config.base import ResumeClass
from homeostat.config.hub_names import portable
from homeostat.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class Change:
    """A key that differs from the run's saved config."""

    path: str
    old: Any
    new: Any
    resume: ResumeClass


def saved_config(file: Path) -> RunConfig:
    """Read the resolved config of a run. Raises ValueError with one line that says what is wrong.

    The line has no full stop, because callers put it into a sentence.
    """
    try:
        return RunConfig.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole file"
        raise ValueError(f"{place}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise ValueError(str(error).splitlines()[0]) from None


def compare_configs(old: RunConfig, new: RunConfig) -> list[Change]:
    """Return every key that differs, with its consequence for resuming the run."""
    return list(_changes(old, new, ""))


def _changes(old: BaseModel, new: BaseModel, prefix: str) -> list[Change]:
    found: list[Change] = []
    for name, info in type(new).model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        same_class = type(before) is type(after)
        if isinstance(after, BaseModel) and same_class:
            found += _changes(before, after, f"{prefix}{name}.")
            continue
        # A cache of the hub may have been moved: its paths are compared by name and commit.
        old_value, new_value = _plain(before), _plain(after)
        if before != after and portable(old_value) != portable(new_value):
            resume = _resume_class(info)
            found.append(Change(f"{prefix}{name}", old_value, new_value, resume))
    return found


def experiment_digest(config: RunConfig) -> str:
    """Return a digest of every key that changes what a run computes: all but the `free` ones."""
    text = json.dumps(_binding(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _binding(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_binding(item) for item in value]
    if not isinstance(value, BaseModel):
        return portable(value)
    return {
        name: _binding(getattr(value, name))
        for name, info in type(value).model_fields.items()
        if _resume_class(info) != "free"
    }


def _resume_class(info: FieldInfo) -> ResumeClass:
    extra = info.json_schema_extra
    found = extra.get("resume", "forbid") if isinstance(extra, dict) else "forbid"
    return cast(ResumeClass, found)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def as_recipe(config: RunConfig) -> RunConfig:
    """Return a resolved config as if a recipe had set only what differs from the defaults.

    Settings that do not apply to a run may not be set, and a saved config names all of them.
    """
    return cast(RunConfig, _with_changed_fields(config))


def _with_changed_fields(settings: BaseModel) -> BaseModel:
    values = {name: getattr(settings, name) for name in type(settings).model_fields}
    inner = {n: _with_changed_fields(v) for n, v in values.items() if isinstance(v, BaseModel)}
    copied = settings.model_copy(update=inner)
    changed = {
        name
        for name, info in type(settings).model_fields.items()
        if values[name] != info.get_default(call_default_factory=True)
    }
    object.__setattr__(copied, "__pydantic_fields_set__", changed)
    return copied
