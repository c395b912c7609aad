"""A recipe in the making: the settings that are left, the keys that are set, and the notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from homeostat.config.loading.tree import child, parts
from homeostat.health.frameworks import Framework
from homeostat.importing.entries import Entry, ForeignFile, Given, Needed, Status
from homeostat.importing.recognise import fold, keys_by_name

_COMPUTED = "the script computes it: set it yourself"
_ENVIRONMENT = "it comes from the environment of the script: set it yourself"
# Keys whose values may name a variable of the environment, as part of a path.
_PATHS = (
    "model.path",
    "critic.path",
    "data.train.path",
    "data.validation.path",
    "runs_dir",
    "lora.path",
    "name",
)


@dataclass(slots=True)
class Draft:
    """Collects a recipe. Every setting gets exactly one entry: `left` has those without one."""

    framework: Framework
    file: ForeignFile
    devices: int | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    comments: dict[str, str] = field(default_factory=dict)
    needed: list[Needed] = field(default_factory=list)
    left: list[Given] = field(default_factory=list)

    def __post_init__(self) -> None:
        for given in self.file.settings:
            if given.is_computed:
                self._enter(given, Status.UNKNOWN, why=_COMPUTED)
            elif given.value in (None, "", [], {}):
                self._enter(given, Status.NOT_NEEDED, why="it is not set")
            elif _is_open(given.value) and not set(self.keys(given)) & set(_PATHS):
                self._enter(given, Status.UNKNOWN, why=_ENVIRONMENT)
            else:
                self.left.append(given)

    def keys(self, given: Given) -> tuple[str, ...]:
        """Return our keys for a setting's name."""
        return keys_by_name(self.framework.name).get(fold(given.name), ())

    def all(self, key: str) -> list[Given]:
        """Return the settings that are left of those that mean a key."""
        return [given for given in self.left if key in self.keys(given)]

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of the first setting that means a key, settled or not."""
        for given in self.file.settings:
            is_known = not given.is_computed and not _is_open(given.value)
            if key in self.keys(given) and given.value is not None and is_known:
                return given.value
        return default

    def has(self, key: str) -> bool:
        """Return whether the file has a setting that means a key."""
        return self.value(key) is not None

    def get(self, place: str, default: Any = None) -> Any:
        """Return a value of the recipe."""
        here: Any = self.recipe
        for part in parts(place):
            here = child(here, part)
        return default if here is None else here

    def set(self, place: str, value: Any) -> None:
        """Set a key of the recipe."""
        *sections, last = place.split(".")
        here = self.recipe
        for section in sections:
            if not isinstance(here.get(section), dict):
                here[section] = {}
            here = here[section]
        here[last] = value

    def take(self, given: Given, place: str, value: Any, *, how: str = "", why: str = "") -> None:
        """Set a key from a setting; `how` says in which respect it is only alike."""
        self.set(place, value)
        self.note(given, place, value, how=how, why=why)

    def note(self, given: Given, place: str, value: Any, *, how: str = "", why: str = "") -> None:
        """Enter a setting that has its effect at a place of the recipe."""
        status = Status.APPROXIMATED if how else Status.TAKEN
        self._enter(given, status, key=place, value=value, why=how or why)

    def leave(self, given: Given, status: Status, why: str, *, key: str = "") -> None:
        """Enter a setting that the recipe has no key for."""
        self._enter(given, status, key=key, why=why)

    def leave_all(self, keys: tuple[str, ...], status: Status, why: str) -> None:
        """Enter all settings that are left and mean one of some keys."""
        for key in keys:
            for given in self.all(key):
                self.leave(given, status, why)

    def need(self, place: str, why: str) -> None:
        """Say that the user must look at a key; it becomes a comment in the recipe."""
        self.needed.append(Needed(place, why))
        self.comments[place] = why

    def _enter(
        self, given: Given, status: Status, *, key: str = "", value: Any = None, why: str = ""
    ) -> None:
        self.entries.append(Entry(given, status, key, value, why))
        self.left = [one for one in self.left if one is not given]

    def __iter__(self) -> Iterator[Given]:
        return iter(list(self.left))


def _is_open(value: Any) -> bool:
    """Return whether a text has a variable of the shell that the script does not assign."""
    return isinstance(value, str) and "$" in value
