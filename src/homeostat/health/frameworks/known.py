"""The settings that exist in each framework and the values they accept, read from its sources.

`known/<framework>.toml` lists them, with the repositories, commits and dates, and with the file in
which each was found. The doctor recommends no setting that is not listed, because guides and older
versions name some that do not exist. `homeostat dev check-settings` compares the lists with a
checkout or with installed packages.

Two more lists hold what the sentences of any fix may mention: `environment` has environment
variables, `commands` has flags of programs such as pip, docker and torchrun.

The kind of a setting is the tuple of values that it allows, or one of

    int  float  bool    numbers and booleans
    switch              a flag of the command line that is given without a value
    text                a word or path that only the user knows; also what may be null
    list  table         several values, or names with values
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

KINDS = ("int", "float", "bool", "switch", "text", "list", "table")
_FOLDER = Path(__file__).with_suffix("")
_INT = re.compile(r"[-+]?\d{1,18}")
_WORDS = {
    "true": True,
    "on": True,
    "yes": True,
    "false": False,
    "off": False,
    "no": False,
}
# A precision has several names; a framework may accept only one of them.
_DTYPES = {
    "fp32": ("float32", "32-true"),
    "bf16": ("bfloat16", "bf16-true"),
    "fp16": ("float16", "half"),
}

Kind = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """The repository from which settings of a list were read.

    `commit` is a commit, or the tag of the release whose package was read. `version` is the version
    in the sources at that commit, or the release before it with the number of commits since
    ("0.9.5+54"). `found` maps a place -> the settings that it defines (places.py of `homeostat dev
    check-settings`). `prefix` is what a user writes before names of this source: slime's
    --sglang-log-level is SGLang's --log-level.
    """

    repository: str
    commit: str
    date: str = ""
    version: str = ""
    prefix: str = ""
    found: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Known:
    """A framework's settings: the name as a user writes it -> its kind."""

    sources: tuple[Source, ...] = ()
    settings: Mapping[str, Kind] | None = None

    def spelling(self, name: str) -> str | None:
        """Return the name as the framework's sources write it; None if they have no such setting.

        Tables that several frameworks share leave out the dashes of command line flags.
        """
        return next((one for one in (name, f"--{name}") if one in (self.settings or {})), None)

    def kind(self, name: str) -> Kind:
        """Return the kind of a setting.

        Raises KeyError for a name that `spelling` does not return.
        """
        return (self.settings or {})[name]


NOTHING = Known()


@cache
def known(framework: str) -> Known:
    """Return the known settings of a framework; NOTHING if there is no file for it."""
    path = _FOLDER / f"{framework}.toml"
    if not path.exists():
        return NOTHING
    # Few logs need tomllib, and importing it takes as long as a dozen rules.
    import tomllib

    told = tomllib.loads(path.read_text(encoding="utf-8"))
    settings = {
        name: tuple(map(str, kind)) if isinstance(kind, list) else kind
        for name, kind in told["settings"].items()
    }
    return Known(tuple(map(_source, told.get("source", ()))), settings)


def _source(told: dict[str, Any]) -> Source:
    found = {place: tuple(names) for place, names in told.get("found", {}).items()}
    fields: dict[str, Any] = {**told, "found": found}
    return Source(**fields)


def written(text: str, kind: Kind) -> str | None:
    """Return a value as the framework's config writes it; None if it is not of this kind."""
    found = literal(text)
    if isinstance(kind, tuple):
        meant = (text.lower(), *_DTYPES.get(text.lower(), ()))
        return next((choice for choice in kind if choice.lower() in meant), None)
    if kind in ("bool", "switch"):
        return str(found).lower() if isinstance(found, bool) else None
    if kind == "int":
        return text if _INT.fullmatch(text) else None
    if kind in ("text", "list", "table"):
        return text if text.lower() in ("null", "none") else None
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return text if is_number else None


def literal(text: str) -> bool | int | float | None:
    """Return the boolean or number that a text stands for; None for words."""
    folded = text.strip().lower()
    if folded in _WORDS:
        return _WORDS[folded]
    if _INT.fullmatch(folded):
        return int(folded)
    try:
        number = float(folded)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def is_same_value(one: object, other: object) -> bool:
    """Return whether two values of a setting mean the same, however they are written."""
    return _normal(one) == _normal(other)


def _normal(value: object) -> object:
    if isinstance(value, str):
        found = literal(value)
        text = value.strip().strip("'\"").lower()
        value = found if found is not None else None if text in ("none", "null", "") else text
    # In Python True == 1, but a switch that is on is not the number one.
    return (type(value) is bool, value)
