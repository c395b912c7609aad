"""The shape of a framework's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Framework:
    """`metrics`: their name -> ours. `scales`: our metric -> factor from their unit to ours (GB to
    bytes, say). `settings`: our key -> their name, first the one that a user would set, then other
    spellings that logs use. `marks`: texts that only this framework's output has (as in log.py).
    """

    name: str
    title: str
    metrics: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    marks: tuple[str, ...] = ()

    def setting_name(self, key: str) -> str | None:
        """What they call one of our keys; ours are ours."""
        if self.name == "homeostat":
            return key
        names = self.settings.get(key)
        return names[0] if names else None
