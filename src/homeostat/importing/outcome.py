"""The outcome of converting a value, and the converters that all sections share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from homeostat.importing.draft import Draft
from homeostat.importing.entries import Given, Status


@dataclass(frozen=True, slots=True)
class Converted:
    """Our value, further keys that it needs, and in which respect it is only alike."""

    value: Any
    how: str = ""
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Left:
    """A setting that sets nothing, and why."""

    why: str
    status: Status = Status.NOT_NEEDED


Outcome = Converted | Left
Converter = Callable[[Given, Draft], Outcome]


def plain(given: Given, _: Draft) -> Outcome:
    """Take the value as it is; 3.0 is 3."""
    value = given.value
    return Converted(int(value) if isinstance(value, float) and value.is_integer() else value)


def positive(given: Given, draft: Draft) -> Outcome:
    """Take a value above 0; elsewhere 0 or -1 switches a thing off."""
    if given.value is False or (isinstance(given.value, int | float) and given.value <= 0):
        return Left("0 or less means: not at all, which is the default here")
    return plain(given, draft)


def interval(given: Given, draft: Draft) -> Outcome:
    """Take a number of steps; a share of the run cannot be converted."""
    if isinstance(given.value, float) and 0 < given.value < 1:
        return Left("a share of the run: set a number of steps", Status.UNKNOWN)
    return positive(given, draft)
