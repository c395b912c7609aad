"""Evaluate the health rules while a run is in progress, and record their findings.

    records, events, samples             -> health.Monitor -> findings.jsonl, the view
    an event of one of the run's guards  -> also recorded as the remedy that the guard applied

On resume, open findings are rebuilt from metrics.jsonl and findings.jsonl. The rest of the state of
the monitor is part of a checkpoint (`state`).
"""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from homeostat.config.health import HealthConfig
from homeostat.config.run import RunConfig
from homeostat.errors import (
    CheckpointError,
    ConfigError,
    PluginError,
    Problem,
    TrainingHaltedError,
)
from homeostat.health.finding import Finding, Level
from homeostat.health.live.monitor import Monitor
from homeostat.health.own_guards import OWN_GUARDS
from homeostat.health.readers.values.settings import flat
from homeostat.health.records import Change, State, from_json, still_open
from homeostat.health.registry import rules_with
from homeostat.health.view import Event, Kind, SampleText
from homeostat.health.watchlist import Allowed, Watchlist, fits
from homeostat.observe.jsonl import is_event, is_finding, iter_jsonl, read_metrics
from homeostat.observe.recorder import Recorder
from homeostat.observe.run_dir import RunDir
from homeostat.run.healing.tokenizer_probe import compare_tokenizers

# Number of completions of a step that the rules see.
SAMPLES_PER_STEP = 16

log = logging.getLogger(__name__)


def sound_state(state: Any, *, place: str) -> Mapping[str, Any]:
    """Return a monitor's state from a checkpoint unchanged. Raises CheckpointError if malformed."""
    fields: dict[str, Any] = state if isinstance(state, dict) else {"quiet": None}
    quiet, allowed = fields.get("quiet", []), fields.get("allowed", [])
    is_sound = isinstance(quiet, list) and isinstance(allowed, list)
    is_sound = is_sound and all(isinstance(code, str) for code in allowed)
    if not (is_sound and all(_is_quiet(entry) for entry in quiet)):
        raise CheckpointError(f"{place}: health.monitor was not written by a run: {state!r:.100}.")
    return fields


def _is_quiet(entry: Any) -> bool:
    """Return whether this is [code, subject, number of records without the finding]."""
    return isinstance(entry, list) and [type(part) for part in entry] == [str, str, int]


class Watch:
    """Passes everything that is recorded to the monitor, and records what it finds.

    `halting` is the finding because of which the run is to halt. `past_events` are the kinds of
    events of the steps up to the one that the run resumed from.
    """

    def __init__(
        self, config: RunConfig, recorder: Recorder, *, total_steps: int, state: Mapping[str, Any]
    ) -> None:
        """`state` is the monitor's state from the checkpoint that the run resumes from."""
        self.monitor = Monitor(
            rules_with(config.health.rules),
            kind=Kind(config.kind),
            settings=settings_of(config),
            total_steps=total_steps,
            watchlist=watchlist_of(config.health),
        )
        self.halting: Finding | None = None
        self.last_step = 0
        self.past_events: frozenset[str] = frozenset()
        self._halts = config.health.on_error == "halt"
        self._model = config.model
        self._recorder = recorder
        self._state = state
        self._events: list[Event] = []
        self._samples: list[SampleText] = []
        self._reported_broken: set[str] = set()
        self._reported_watching = 0
        self._seconds = 0.0

    def begin(self, run_dir: RunDir, *, start_step: int) -> None:
        """Restore the state from the files of the run directory, and listen to the recorder."""
        records = [
            (record["step"], {n: v for n, v in record.items() if n not in ("step", "time")})
            for record in read_metrics(run_dir.metrics)
        ]
        events = _past_events(run_dir, start_step)
        self.monitor.restore(records, events, _open_findings(run_dir), self._state)
        self._recorder.listener = self
        self.last_step = start_step
        self.past_events = frozenset(event.kind for event in events)
        compared = compare_tokenizers(self._model)
        if compared is not None:
            self._recorder.event("tokenizer_compared", start_step, **compared)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        started = time.perf_counter()
        self.last_step = step
        events, samples = self._events, self._samples
        self._events, self._samples = [], []
        changes = self.monitor.observe(step, metrics, events=events, samples=samples)
        self._seconds += time.perf_counter() - started
        for change in changes:
            self._report(change)
        if self.monitor.num_watching != self._reported_watching:
            self._reported_watching = self.monitor.num_watching
            self._recorder.event("rules_watching", step, rules=self._reported_watching)
        for code, error in self.monitor.broken.items():
            if code not in self._reported_broken:
                self._reported_broken.add(code)
                self._recorder.event("rule_failed", step, code=code, error=error)

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        self._events.append(Event(kind, step, dict(fields)))
        guard = OWN_GUARDS.get(kind)
        if guard is not None and guard.applies(fields):
            self._recorder.event("remedy_applied", step, **guard.described(fields))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep a few completions, evenly spaced, for the next record."""
        chosen = rows[:: max(1, len(rows) // SAMPLES_PER_STEP)][:SAMPLES_PER_STEP]
        self._samples += [
            SampleText(
                step=step,
                text=row["completion"],
                prompt=row["prompt"],
                reward=row["reward"],
                stop_reason=row["stop_reason"],
            )
            for row in chosen
        ]

    def take_seconds(self) -> float:
        """Return the seconds spent on rules since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores.

        `errors` are the codes of open errors: a checkpoint that has any is no target of a rollback.
        """
        errors = [f.code for f in self.monitor.open if f.level is Level.ERROR]
        return {**self.monitor.state(), "errors": errors}

    def require_no_halt(self) -> None:
        """Raise TrainingHaltedError if a finding opened for which the run is to halt."""
        if self.halting is None:
            return
        code, name, message = self.halting.code, self.halting.name, self.halting.message
        facts = {"code": code, "name": name, "message": message}
        self._recorder.event("health_halted", self.last_step, **facts)
        raise TrainingHaltedError(
            f"halted after step {self.last_step} (health.on_error=halt): {code} {name}: {message} "
            f"`homeostat explain {code}` says more. The run is saved; run the same command to "
            "resume it."
        )

    def finish(self, step: int) -> None:
        """Report allowances that a complete run never used, so that they can be removed."""
        for one in self.monitor.unused_allowances():
            log.warning("health.allow: %s never occurred (%s)", one.code, one.reason)
            self._recorder.event("allowance_unused", step, code=one.code, reason=one.reason)

    def _report(self, change: Change) -> None:
        self._recorder.finding(change.step, change.as_record())
        finding = change.finding
        if change.state is State.OPEN and finding.level is Level.ERROR and self._halts:
            self.halting = self.halting or finding


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return all settings by their dotted names, as the rules read them."""
    return flat(config.model_dump(mode="json"))


def watchlist_of(health: HealthConfig) -> Watchlist:
    """Return which rules the monitor evaluates, with their levels, options and allowances."""
    return Watchlist(
        levels=health.levels,
        options=health.options,
        allow=tuple(Allowed(one.code, one.reason, one.until_step) for one in health.allow),
        clear_after=health.clear_after,
    )


def require_known_rules(health: HealthConfig) -> None:
    """Require that every rule and option that the section `health` names exists.

    Plug-ins among them are imported here.
    """
    if problems := list(_unknown_names(health)):
        raise ConfigError(problems)


def _unknown_names(health: HealthConfig) -> Iterator[Problem]:
    try:
        by_code = {rule.code: rule for rule in rules_with(health.rules)}
    except PluginError as error:
        hint = "Install or repair the plug-in, or correct its import path."
        yield Problem("health.rules", str(error), hint)
        return
    named = [(f"health.levels.{code}", code) for code in health.levels]
    named += [(f"health.options.{code}", code) for code in health.options]
    named += [(f"health.allow.{number}.code", one.code) for number, one in enumerate(health.allow)]
    for place, code in named:
        if code not in by_code:
            hint = _did_you_mean(code, list(by_code)) or "`homeostat rules` lists them."
            yield Problem(place, f"no rule has the code {code!r}.", hint)
    for code, options in health.options.items():
        known = by_code[code].option_fields() if code in by_code else {}
        for name, value in options.items() if code in by_code else ():
            place = f"health.options.{code}.{name}"
            if name not in known:
                hint = _did_you_mean(name, list(known)) or f"It has: {', '.join(known) or 'none'}."
                yield Problem(place, f"{code} has no such option.", hint)
            elif not fits(value, known[name][0]):
                text = f"{value!r} does not have the type of the default, {known[name][0]!r}."
                yield Problem(place, text, f"({known[name][1]})")


def _did_you_mean(word: str, known: list[str]) -> str:
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"Did you mean {found[0]}?" if found else ""


def _past_events(run_dir: RunDir, start_step: int) -> list[Event]:
    """Return the events up to `start_step`, without those of steps that were rolled back."""
    found: list[Event] = []
    for record in iter_jsonl(run_dir.events, is_sound=is_event):
        step, kind = record.pop("step"), record.pop("kind")
        if kind in ("run_resumed", "rolled_back"):
            found = [event for event in found if event.step is None or event.step <= step]
        found.append(Event(kind, step, record))
    return [event for event in found if event.step is None or event.step <= start_step]


def _open_findings(run_dir: RunDir) -> list[Finding]:
    return still_open(iter_jsonl(run_dir.findings, is_sound=_can_be_read))


def _can_be_read(record: Mapping[str, Any]) -> bool:
    try:
        from_json(record)
    except (KeyError, TypeError, ValueError):
        return False
    return is_finding(record)
