"""The format of a framework's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from homeostat.health import names
from homeostat.observe.names import describe

HOLE = "<name>"


@dataclass(frozen=True, slots=True)
class Framework:
    """The names of one framework.

    `metrics` maps its name -> ours; one `<name>` stands for the same text on both sides. If several
    of its names mean the same metric, the first in the table that a run logged is used. `scales`
    maps our metric -> factor from its unit to ours (for example GB to bytes). `settings` maps our
    key -> its names: first the one that a user would set, then other spellings in logs. `flags`
    maps its switch -> our key and the value of that key when the switch is on. `base` is the
    framework whose settings it accepts unchanged, by its name here. `built_on` are other frameworks
    whose modules, actors and rows appear in its output. `marks` are texts that only this framework
    prints (patterns of log.py).
    """

    name: str
    title: str
    metrics: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    flags: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    base: str = ""
    built_on: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    _holes: tuple[tuple[str, str, str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        split = ((key.partition(HOLE), ours) for key, ours in self.metrics.items() if HOLE in key)
        holes = tuple((start, end, ours) for (start, _, end), ours in split)
        object.__setattr__(self, "_holes", holes)

    def canonical(self, name: str) -> str | None:
        """Return our name for one of the framework's metrics; None if no rule knows the metric.

        A name of our own catalogue maps to itself, because frameworks copy names from each other.
        """
        found = self.metrics.get(name)
        if found is not None:
            return found
        for start, end, ours in self._holes:
            hole = name[len(start) : len(name) - len(end)]
            if hole and name.startswith(start) and name.endswith(end):
                return ours.replace(HOLE, hole)
        return name if name in names.FOREIGN or describe(name) is not None else None

    def switched(self, name: str, value: object) -> tuple[str, object] | None:
        """Return our key and its value if one of the framework's switches is on; else None."""
        is_on = value is True or str(value).lower() in ("true", "1")
        return self.flags.get(_plain(name)) if is_on else None


def _plain(setting: str) -> str:
    return setting.lstrip("-").replace("-", "_").lower()
