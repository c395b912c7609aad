"""May a run directory be continued with this config? Each key's resume class decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from homeostat.config.base import ResumeClass
from homeostat.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class Change:
    """A key that differs from the run's saved config."""

    path: str
    old: Any
    new: Any
    resume: ResumeClass


def compare_configs(old: RunConfig, new: RunConfig) -> list[Change]:
    """Every key that differs, with what that means for continuing the run."""
    return list(_changes(old, new, ""))


def _changes(old: BaseModel, new: BaseModel, prefix: str) -> list[Change]:
    found: list[Change] = []
    for name, info in type(new).model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        same_class = type(before) is type(after)
        if isinstance(after, BaseModel) and same_class:
            found += _changes(before, after, f"{prefix}{name}.")
        elif before != after:
            extra = info.json_schema_extra
            resume = extra.get("resume", "forbid") if isinstance(extra, dict) else "forbid"
            found.append(Change(f"{prefix}{name}", _plain(before), _plain(after), resume))  # type: ignore[arg-type]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
