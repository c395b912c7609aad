"""Express a fix for the framework that was run: its setting, and a valid value.

This is the only place that decides what is printed, for people and for programs. A setting is named
only if the framework's own sources have it (known.py), and a value only if it is of the setting's
kind. Everything else in a fix becomes advice in words. Our own keys are shown only for our own
runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from homeostat.health.finding import Fix
from homeostat.health.frameworks import ALL, HOMEOSTAT, UNKNOWN, Framework
from homeostat.health.frameworks.known import (
    Kind,
    is_same_value,
    known,
    literal,
    written,
)
from homeostat.health.frameworks.plain_words import OURS_ALONE, PLAIN_WORDS

_OUR_KEY = re.compile(
    r"\b(?:agents|algorithm|checkpoint|cluster|critic|data|ebft|engine|eval|health|lora|model"
    r"|observe|preference|reference|rewards|rollout|sync|trainer)(?:\.[a-z][a-z_]*)+(?<!\.py)\b(?!\()"
)
_SEVERAL = ", "
# Last parts of keys that are unclear without their section.
_SHARED = frozenset({"coefficient", "interval", "lr", "path", "timeout_s", "type"})


@dataclass(frozen=True, slots=True)
class ToldFix:
    """A fix, expressed for one framework.

    `setting` is None if the framework has no known setting for it. `value` is "" if the fix has no
    value of the setting's kind; `advice` then says in words what to do.
    """

    setting: str | None
    value: str
    advice: str
    why: str
    grade: str


def told(fix: Fix, framework: Framework) -> ToldFix:
    """Return the fix with the setting's name in the framework of the run."""
    why = in_their_words(fix.why, framework)
    found = _named(fix, framework)
    if not found:
        # The framework has no known setting for it, so describe the setting in words.
        words, value = _plainly(fix.setting), in_their_words(fix.value, framework)
        advice = f"{words} ({value})" if words and value else words or value
        return ToldFix(None, "", advice, why, fix.grade.value)
    (setting, given), *others = found
    value, advice = _value(fix, given, kind=known(framework.name).kind(setting))
    if not value:
        advice = in_their_words(advice, framework)
    beside = [f"with {other}{f' = {one}' if one else ''}" for other, one in others]
    words = ", ".join(filter(None, (advice, *beside)))
    return ToldFix(setting, value, words, why, fix.grade.value)


def told_all(fixes: Sequence[Fix], framework: Framework) -> list[ToldFix]:
    """Return the fixes of a finding, without those for settings that the framework does not have.

    If none would be left, or if the framework is unknown, return all except those that only our
    trainer can follow.
    """
    pairs = [(fix, told(fix, framework)) for fix in fixes]
    if framework is not HOMEOSTAT:
        pairs = [
            (fix, here) for fix, here in pairs if here.setting or fix.setting not in OURS_ALONE
        ]
    there = [here for fix, here in pairs if here.setting or not fix.setting]
    everything = [here for _, here in pairs]
    return everything if framework is UNKNOWN else there or everything


def in_their_words(text: str, framework: Framework) -> str:
    """Return one of our sentences with settings under the framework's names."""
    if framework.name == HOMEOSTAT.name:
        return text
    return _OUR_KEY.sub(lambda m: setting_name(m[0], framework) or _plainly(m[0]), text)


def setting_name(key: str, framework: Framework) -> str | None:
    """Return the framework's current name of one of our keys; None if it has no such setting."""
    facts = known(framework.name)
    if framework.name == HOMEOSTAT.name:
        return facts.spelling(key)
    for table in lineage(framework):
        spellings = map(facts.spelling, table.settings.get(key, ()))
        if found := next(filter(None, spellings), None):
            return found
    return None


def lineage(framework: Framework) -> Iterator[Framework]:
    """Yield the framework, then those whose settings it accepts unchanged."""
    found: Framework | None = framework
    while found is not None:
        yield found
        found = ALL.get(found.base)


def named_settings(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and values of an entry of `Fix.theirs`: `name` or `name=value`, with commas."""
    for part in text.split(_SEVERAL):
        name, _, value = part.partition("=")
        yield name.strip(), value.strip()


def _named(fix: Fix, framework: Framework) -> list[tuple[str, str]]:
    """Return the settings of a fix, each with its value or ""."""
    facts = known(framework.name)
    for table in lineage(framework):
        pairs = named_settings(fix.theirs.get(table.name, ""))
        if found := [(name, value) for one, value in pairs if (name := facts.spelling(one))]:
            return found
        for switch, (key, value) in table.flags.items():
            name = facts.spelling(switch) if key == fix.setting else None
            if name and is_same_value(value, fix.value):
                return [(name, "true")]
            if name and isinstance(value, bool) and literal(fix.value) == (not value):
                return [(name, "false")]
    if fix.setting and (name := setting_name(fix.setting, framework)):
        return [(name, "")]
    return []


def _value(fix: Fix, given: str, *, kind: Kind) -> tuple[str, str]:
    """Return the value to print, and advice. At most one of the two is not empty."""
    if given and kind in ("text", "list", "table"):
        return given, ""
    value = written(given or fix.value, kind)
    if kind == "switch":
        # A switch is given or left out, so there is no value to print.
        return "", {"true": "", "false": "leave it out"}.get(value or "", given or fix.value)
    if value is not None:
        return value, ""
    is_on = literal(fix.value)
    if isinstance(is_on, bool):
        return "", "set it" if is_on else "do not set it"
    # One of our choices (auto, drop) means nothing in a framework with other choices.
    return "", "" if _is_our_choice(fix) else fix.value


def _is_our_choice(fix: Fix) -> bool:
    facts = known(HOMEOSTAT.name)
    name = facts.spelling(fix.setting)
    kind = facts.kind(name) if name else ""
    return isinstance(kind, tuple) and written(fix.value, kind) is not None


def _plainly(key: str) -> str:
    """Describe one of our keys in words; "" stays ""."""
    if key in PLAIN_WORDS:
        return PLAIN_WORDS[key]
    *sections, last = key.replace("[]", "").split(".")
    words = last.removesuffix("_s").replace("_", " ")
    return f"{sections[-1]} {words}" if sections and last in _SHARED else words
