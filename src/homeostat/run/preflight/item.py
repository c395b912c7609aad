"""The result of one check of `homeostat check`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the table that `homeostat check` prints.

    `facts` are the values in `text`, in a form that programs can read.
    """

    name: str
    level: Level
    text: str
    facts: dict[str, Any] = field(default_factory=dict)
