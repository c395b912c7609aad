"""One line of what `homeostat check` found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the sheet. `facts` is the same for a program to read."""

    name: str
    level: Level
    text: str
    facts: dict[str, Any] = field(default_factory=dict)
