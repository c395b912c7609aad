"""Evaluate rules while a run is running: which findings open, which close, which are allowed.

    record + events + samples -> tails -> rules whose inputs changed -> folded -> open findings

Each rule decides by its own windows whether it fires. A finding opens as soon as its rule fires,
and closes after `clear_after` records without it (open_findings.py). The same records give the same
findings, whether or not the run was interrupted.

A rule takes longer the more records it looks at. To keep the time per step constant, rules take
turns once there are many records: each is evaluated at every second, third or fourth record, but at
every record while it fires.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from homeostat.health.diagnose import folded, judge_ready, what_is_missing
from homeostat.health.finding import Finding, NotEvaluated
from homeostat.health.frameworks import HOMEOSTAT, Framework
from homeostat.health.live.open_findings import OpenFindings
from homeostat.health.live.tails import KEEP, Tails
from homeostat.health.records import Change
from homeostat.health.rule import Rule
from homeostat.health.view import Event, Kind, RunView, SampleText, Series
from homeostat.health.watchlist import NOTHING_SET, Allowed, Watchlist

# Exceptions that a bug in a rule raises. The rule is disabled then; a rule must not stop a run.
_MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
_NOT_METRICS = ("setting:", "fact:")
# Up to this many records every rule is evaluated each time; each further multiple adds a turn.
RECORDS_PER_TURN = 32
MAX_TURNS = 4


@dataclass(slots=True)
class _Asked:
    """A rule, the metrics that it needs, and its last result."""

    rule: Rule
    metrics: frozenset[str]
    verdict: list[Finding] = field(default_factory=list)
    # True if new input has arrived since the rule was last evaluated.
    waits: bool = True


class Monitor:
    """Evaluate the rules once per record, in order."""

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        kind: Kind,
        settings: Mapping[str, Any],
        total_steps: int | None,
        watchlist: Watchlist | None = None,
        keep: int = KEEP,
        framework: Framework = HOMEOSTAT,
        raw_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`framework` wrote the records; `raw_settings` are the settings under its own names."""
        self.watchlist = watchlist or NOTHING_SET
        self.settings = settings
        self._framework = framework
        self._raw_settings = raw_settings or {}
        self.facts: dict[str, Any] = {}
        # Code -> error, for rules that were disabled because of a bug.
        self.broken: dict[str, str] = {}
        self._kind = kind
        self._total_steps = total_steps
        self._tails = Tails(keep)
        asked = [rule for rule in rules if not rule.kinds or kind in rule.kinds]
        self._rules = [
            _Asked(rule, _metrics_of(rule))
            for rule in asked
            if not self.watchlist.is_off(rule.code)
        ]
        self._of_rules = tuple(rules)
        self._open = OpenFindings(clear_after=self.watchlist.clear_after)
        self._allowed: set[str] = set()
        # Metrics that arrived since the rules were last evaluated.
        self._fresh: set[str] = set()
        self._ready: list[_Asked] | None = None
        self._known: tuple[Any, ...] = ()
        self._known_of_settings: dict[Any, Any] = {}
        self._num_broken = 0

    @property
    def open(self) -> list[Finding]:
        """Return the findings that are open now, the most likely illness first."""
        return self._open.findings

    @property
    def num_watching(self) -> int:
        """Return the number of rules whose needs are met."""
        return len(self._ready or ())

    def reconfigure(self, settings: Mapping[str, Any]) -> None:
        """Use settings that changed during the run."""
        self.settings = settings
        self._known_of_settings = {}
        self._ready = None

    @property
    def metrics(self) -> Mapping[str, Series]:
        """Return the newest records."""
        return self._tails.metrics

    def series(self, name: str) -> Series | None:
        return self._tails.metrics.get(name)

    def observe(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        events: Iterable[Event] = (),
        samples: Iterable[SampleText] = (),
    ) -> list[Change]:
        """Add a record, evaluate the rules, and return the findings that opened or closed."""
        self._tails.add_events(events)
        self._tails.add_samples(samples)
        self.add(step, metrics)
        turns = 1 + min(MAX_TURNS - 1, self._tails.num_records // RECORDS_PER_TURN)
        with np.errstate(all="ignore"):
            self._ask(self._fresh, step=step, turns=turns)
        self._fresh = set()
        found = [self.watchlist.levelled(f) for asked in self._rules for f in asked.verdict]
        kept = folded(found, self._of_rules) if found else []
        explained = {finding.key for finding in found} - {finding.key for finding in kept}
        return self._open.settle(step, self._not_allowed(kept, step), explained=explained)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a record without evaluating rules; they see it at the next call of `observe`."""
        self._tails.add(step, metrics)
        self._fresh.update(metrics)

    def restore(
        self,
        records: Iterable[tuple[int, Mapping[str, float]]],
        events: Iterable[Event],
        findings: Iterable[Finding],
        state: Mapping[str, Any],
    ) -> None:
        """Continue from an earlier part of the run. `state` is what `state()` returned there."""
        for step, metrics in records:
            self._tails.add(step, metrics)
        self._tails.add_events(events)
        quiet = {(code, subject): count for code, subject, count in state.get("quiet", [])}
        self._open.restore(findings, quiet)
        self._allowed = set(state.get("allowed", []))
        with np.errstate(all="ignore"):
            self._ask(self._tails.metrics.keys(), step=0, turns=1)

    def state(self) -> dict[str, Any]:
        """Return the part of the state that records and findings do not contain.

        It is the number of records since each finding was last seen, and the allowances that were
        used.
        """
        quiet = [[*key, count] for key, count in self._open.quiet().items()]
        return {"quiet": quiet, "allowed": sorted(self._allowed)}

    def unused_allowances(self) -> list[Allowed]:
        return [one for one in self.watchlist.allow if one.code not in self._allowed]

    def not_evaluated(self) -> list[NotEvaluated]:
        """Return the rules that cannot be evaluated, and what each lacks."""
        view = self._view()
        missing = ((asked.rule, what_is_missing(asked.rule, view)) for asked in self._rules)
        return [NotEvaluated(rule.code, rule.name, why) for rule, why in missing if why]

    def _view(self) -> RunView:
        tails = self._tails
        return RunView(
            metrics=tails.metrics,
            framework=self._framework,
            kind=self._kind,
            settings=self.settings,
            raw_settings=self._raw_settings,
            events=tails.events,
            samples=tails.samples,
            facts=self.facts,
            total_steps=self._total_steps,
            known_of_settings=self._known_of_settings,
        )

    def _ask(self, fresh: Iterable[str], *, step: int, turns: int) -> None:
        """Evaluate each rule that can be judged, has new input, and whose turn it is."""
        view, new = self._view(), set(fresh)
        for number, asked in enumerate(self._answerable(view)):
            asked.waits |= not asked.metrics or not asked.metrics.isdisjoint(new)
            its_turn = bool(asked.verdict) or (step + number) % turns == 0
            if asked.waits and its_turn:
                asked.waits = False
                asked.verdict = self._judged(asked.rule, view)
        if len(self.broken) > self._num_broken:
            self._num_broken = len(self.broken)
            self._rules = [one for one in self._rules if one.rule.code not in self.broken]
            self._ready = None

    def _judged(self, rule: Rule, view: RunView) -> list[Finding]:
        try:
            found = judge_ready(rule, view, options=self.watchlist.options.get(rule.code))
        except _MISTAKES as error:
            self.broken[rule.code] = f"{type(error).__name__}: {error}"
            return []
        return [] if isinstance(found, NotEvaluated) else found

    def _answerable(self, view: RunView) -> list[_Asked]:
        """Return the rules whose needs are met.

        Most of over a hundred rules lack something at every step. So this is checked again only
        when a new metric, or the first event, sample or another fact, has arrived.
        """
        tails = self._tails
        known = (len(tails.metrics), bool(tails.events), bool(tails.samples), len(self.facts))
        if self._ready is None or known != self._known:
            self._known = known
            self._ready = [one for one in self._rules if not what_is_missing(one.rule, view)]
        return self._ready

    def _not_allowed(
        self, findings: Iterable[Finding], step: int
    ) -> dict[tuple[str, str], Finding]:
        """Return the findings by their keys, except those that the recipe allows."""
        seen: dict[tuple[str, str], Finding] = {}
        for finding in findings:
            allowed = self.watchlist.allowances(finding, step)
            self._allowed.update(one.code for one in allowed)
            if not allowed:
                seen.setdefault(finding.key, finding)
        return seen


def _metrics_of(rule: Rule) -> frozenset[str]:
    """Return the metrics that a rule needs, including all alternatives."""
    needs = [need for need in rule.needs if not need.startswith(_NOT_METRICS)]
    names = (name for need in needs for name in need.split("|"))
    return frozenset(names) - {"log", "events", "samples"}
