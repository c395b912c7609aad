"""A rule: one illness, how it is detected, why it matters, what to do. One file each in rules/.

A rule's file has a docstring with the headings of HEADINGS, an `Options` class, a pure function
`check(view, options)` and `RULE`. It uses no torch, no I/O and no clock: the same check runs
before, during and after a run, on our records and on other frameworks' logs.

`needs` lists the inputs of the check. If one is not available, the check is not called, and the
outcome is "not evaluated" with the reason:

    "reward"                 a metric, by its name in observe/names.py or names.py here
    "reward_std|advantages/std"   either
    "setting:trainer.lr"     a setting, by our key
    "fact:disk"              the result of a probe
    "log", "events", "samples"
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
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


@dataclass(frozen=True, slots=True)
class Option:
    """The default of an option, and its meaning."""

    default: Any
    meaning: str


def option(default: Any, meaning: str) -> Any:
    """Declare an option in the body of a RuleOptions class. Instances have its value instead."""
    return Option(default, meaning)


class RuleOptions:
    """Base class of a rule's Options.

    It is not a dataclass: creating a hundred of those takes as long as everything else that the
    doctor does before it answers.
    """

    def __init__(self, **given: Any) -> None:
        known = self.known()
        unknown = given.keys() - known.keys()
        if unknown:
            raise TypeError(f"unknown options {sorted(unknown)}; known are {sorted(known)}")
        for name, one in known.items():
            setattr(self, name, given.get(name, one.default))

    @classmethod
    def known(cls) -> dict[str, Option]:
        return {name: one for name, one in vars(cls).items() if isinstance(one, Option)}


class NoOptions(RuleOptions):
    """The options of a rule without thresholds."""


@cache
def _defaults(options: type[RuleOptions]) -> RuleOptions:
    return options()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule: its code, name, level and check, and its relation to other rules.

    `kinds` are the kinds of run that the rule is for; empty means all. The other fields fold
    findings into each other, so that one illness is reported once. `explains` are codes of
    symptoms: if this rule fires, they are folded into it. `yields_to` are prefixes of codes that
    say more about the same failure. If one of them fires at level warn or above, this one is folded
    into it; if this one quotes lines, the other one must quote lines of the same place in the log.
    `takes` are prefixes of codes that are folded into this one if they quote lines of the same
    place. `texts` are the patterns of a signature; a line that has one of them counts as quoted
    where another finding yields to this one. `ends_run` means that its words end a process: if they
    are only a warning, they explain neither an exception elsewhere nor what followed from that.
    """

    code: str
    name: str
    family: Family
    level: Level
    confidence: Confidence
    check: Check
    needs: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ()
    options: type[RuleOptions] = NoOptions
    explains: tuple[str, ...] = ()
    yields_to: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    ends_run: bool = False
    page: Callable[[], str] | None = None

    def __post_init__(self) -> None:
        assert _CODE.fullmatch(self.code), self.code
        assert _NAME.fullmatch(self.name), self.name

    @property
    def text(self) -> str:
        """Return the rule's page in Markdown: from `page`, or else the docstring of the rule's
        file.
        """
        if self.page is not None:
            return self.page()
        return sys.modules[self.check.__module__].__doc__ or ""

    def options_with(self, given: Mapping[str, Any] | None) -> RuleOptions:
        """Return the rule's options: the given values, and the defaults of the others."""
        # A live run requests the options at every record. Rules do not change them, so they are
        # cached.
        return self.options(**given) if given else _defaults(self.options)

    def option_fields(self) -> dict[str, tuple[Any, str]]:
        """Return the options: name -> (default, meaning)."""
        return {name: (one.default, one.meaning) for name, one in self.options.known().items()}
