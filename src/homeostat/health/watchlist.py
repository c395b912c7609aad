"""The treatment of findings in one run of ours: its levels, thresholds and allowances.

While a run trains, the monitor has these from the recipe. Everything that judges the run by its
files (doctor, watch, dashboard) has them from its config.json, so that both come to one verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from homeostat.health.finding import Finding, Level
from homeostat.health.rule import Rule

OFF = "off"
_LEVELS = "health.levels."
_OPTIONS = "health.options."
_KNOWN_LEVELS = {OFF, *(str(level) for level in Level)}


@dataclass(frozen=True, slots=True)
class Allowed:
    """A code whose findings are not reported, up to a given step, and the reason."""

    code: str
    reason: str
    until_step: int | None = None

    def holds(self, finding: Finding, step: int) -> bool:
        in_time = self.until_step is None or step <= self.until_step
        return finding.code == self.code and in_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchlist:
    """The treatment of findings in this run. `levels` maps code -> level; "off" disables a rule."""

    levels: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    allow: Sequence[Allowed] = ()
    clear_after: int = 3

    def is_off(self, code: str) -> bool:
        return self.levels.get(code) == OFF

    def levelled(self, finding: Finding) -> Finding:
        """Return a finding at the level that it has in this run."""
        level = self.levels.get(finding.code)
        return finding if level is None else replace(finding, level=Level(level))

    def allowances(self, finding: Finding, step: int) -> list[Allowed]:
        """Return the allowances that hold for a finding at a step."""
        return [one for one in self.allow if one.holds(finding, step)]


NOTHING_SET = Watchlist()


def watchlist_in(settings: Mapping[str, Any], rules: Iterable[Rule]) -> Watchlist:
    """Return the watchlist in the settings of a run of ours, which have dotted names.

    A level or option that is unknown to these rules is left out: the run was made by another
    version, in which it meant something else, or its config.json is damaged.
    """
    return Watchlist(
        levels={
            name.removeprefix(_LEVELS): str(value)
            for name, value in settings.items()
            if name.startswith(_LEVELS) and str(value) in _KNOWN_LEVELS
        },
        options=_options_in(settings, rules),
        allow=_allowed_in(settings.get("health.allow")),
    )


def _options_in(settings: Mapping[str, Any], rules: Iterable[Rule]) -> dict[str, dict[str, Any]]:
    given = {name: value for name, value in settings.items() if name.startswith(_OPTIONS)}
    found: dict[str, dict[str, Any]] = {}
    for rule in rules if given else ():
        known = rule.option_fields()
        for name, (default, _) in known.items():
            value = given.get(f"{_OPTIONS}{rule.code}.{name}")
            if value is not None and fits(value, default):
                found.setdefault(rule.code, {})[name] = value
    return found


def _allowed_in(entries: Any) -> tuple[Allowed, ...]:
    records = entries if isinstance(entries, list) else []
    return tuple(
        Allowed(str(one.get("code")), str(one.get("reason")), _step(one.get("until_step")))
        for one in records
        if isinstance(one, Mapping)
    )


def _step(value: Any) -> int | None:
    return value if type(value) is int else None


def fits(value: Any, default: Any) -> bool:
    """Return whether a value has the type of an option's default."""
    if isinstance(default, bool) or isinstance(value, bool):
        return type(value) is type(default)
    if isinstance(default, float):
        return isinstance(value, int | float)
    return default is None or isinstance(value, type(default))
