"""What became of each setting of a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """What became of a setting."""

    TAKEN = "taken over"
    APPROXIMATED = "approximated"
    PLANNED = "planned"
    NOT_NEEDED = "not needed"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Given:
    """A setting as the file has it. `is_computed`: the value is an expression of a script."""

    name: str
    value: Any
    is_computed: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting, what became of it, our key if there is one, and why or how."""

    given: Given
    status: Status
    key: str = ""
    value: Any = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """The settings of a file, and what else its form says.

    `trainer` is the algorithm that a TRL command or class names (sft, grpo, dpo ...). `devices` is
    the number of processes that a launcher is told to start. `plain_arguments`: a script passes
    transformers' TrainingArguments to the trainer, whose defaults TRL then takes.
    """

    text: str
    settings: tuple[Given, ...]
    trainer: str = ""
    devices: int | None = None
    plain_arguments: bool = False


@dataclass(frozen=True, slots=True)
class Needed:
    """A key that the user has to look at before the recipe can train."""

    key: str
    why: str


@dataclass(frozen=True, slots=True)
class Imported:
    """A recipe, and how it came about. `needed` is also shown as comments in the recipe."""

    framework: str
    recipe: dict[str, Any]
    entries: tuple[Entry, ...]
    needed: tuple[Needed, ...] = ()
    comments: dict[str, str] = field(default_factory=dict)
    # Problems that the recipe's own checks still report.
    problems: tuple[str, ...] = ()

    def count(self, status: Status) -> int:
        """Return the number of settings with this status."""
        return sum(entry.status is status for entry in self.entries)
