"""A rule: one illness, how it is seen, why it matters, what to do. One file each, under rules/.

A rule's file holds a docstring with the headings of HEADINGS, an `Options` dataclass, a pure
function `check(view, options)` and `RULE`. No torch, no I/O, no clock: the same check runs before,
during and after a run, on our records and on other frameworks' logs.

`needs` says what must be there before the check is asked; where it is not, the outcome is "not
evaluated", with the reason:

    "reward"                 a metric, by its name in observe/names.py or names.py here
    "reward_std|advantages/std"   either
    "setting:trainer.lr"     a setting, by our key
    "fact:disk"              what a probe found out
    "log", "events", "samples"
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from homeostat.health.finding import Confidence, Family, Level, Sighting, Unknown
from homeostat.health.view import Kind, RunView

HEADINGS = (
    "What it sees",
    "Why it matters",
    "Likely causes",
    "What to do",
    "Known false alarms",
)
_CODE = re.compile(r"[A-Z]{3}\d{3}")
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

Check = Callable[[RunView, Any], Iterator[Sighting | Unknown]]


def option(default: Any, meaning: str) -> Any:
    """A field of a rule's Options, with what it means."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class NoOptions:
    """For a rule without thresholds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`explains`: codes that are symptoms of this one; where it fires they are folded into it.
    `kinds`: the kinds of run it is about; all, where empty."""

    code: str
    name: str
    family: Family
    level: Level
    confidence: Confidence
    check: Check
    needs: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ()
    options: type = NoOptions
    explains: tuple[str, ...] = ()
    doc: str = ""

    def __post_init__(self) -> None:
        assert _CODE.fullmatch(self.code), self.code
        assert _NAME.fullmatch(self.name), self.name

    @property
    def text(self) -> str:
        """The rule's page: its file's docstring."""
        return self.doc or (sys.modules[self.check.__module__].__doc__ or "")

    def option_fields(self) -> dict[str, tuple[Any, str]]:
        """Option -> its default and its meaning."""
        fields = dataclasses.fields(self.options)
        return {field.name: (field.default, field.metadata["meaning"]) for field in fields}
