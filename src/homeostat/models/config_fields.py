"""Typed reads of a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from homeostat.models.origin import BadConfigError

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed reads of a config.json, so that a wrong value is named and does not crash later."""

    values: Json

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadConfigError(f"{name} is {value!r}, and must be a whole number above 0.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
            raise BadConfigError(f"{name} is {value!r}, and must be a number above 0.")
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number that may be 0."""
        value = self.values.get(name, default)
        return 0 if value == 0 and not isinstance(value, bool) else self.whole(name, default)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise BadConfigError(f"{name} is {value!r}, and must be true or false.")
        return value
