"""The doctor inside another trainer: records go in by the trainer's names, findings come out.

    record -> row (readers) -> our names (frameworks) -> health.Monitor -> stderr, file, webhook

It costs less than 1 % of the time. Every record is kept, but the rules are evaluated only while the
time that they have taken is below that share (pace.py); the next evaluation covers what was kept.
It never breaks a training run: an error in here is reported once, with its cause, and ends the
doctor's work but not the run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from homeostat.errors import HomeostatError
from homeostat.health.finding import Finding, Level
from homeostat.health.frameworks import Framework
from homeostat.health.live.monitor import Monitor
from homeostat.health.log import Log
from homeostat.health.readers.lines.dict_rows import row_of
from homeostat.health.readers.rows.row import RowKind
from homeostat.health.readers.values.settings import flat, ours
from homeostat.health.readers.views.build import translation
from homeostat.health.readers.views.detect import kind_of
from homeostat.health.records import Change, State
from homeostat.health.registry import RULES
from homeostat.health.rule import Rule
from homeostat.health.view import Kind
from homeostat.integrations.outlets import Sender, Webhook
from homeostat.integrations.pace import Pace
from homeostat.integrations.telling import Message, Teller
from homeostat.observe.redact import mask_text

FINDINGS_FILE = "homeostat_findings.jsonl"
# Number of records that are kept back until a training record shows the kind of the run.
_MAX_WAITING = 1_000
# Seconds that may be spent before the share of the time counts.
_ALLOWANCE_S = 0.2


def say(text: str) -> None:
    """Write a line of the doctor to standard error, beside the trainer's own output.

    A progress bar of tqdm, which has no line end, is drawn anew below it.
    """
    bar = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bar is None:
        print(text, file=sys.stderr, flush=True)
    else:
        bar.write(text, file=sys.stderr)


def as_level(word: str | None, *, name: str) -> Level | None:
    """Return the level that a user named; None stays None. Raises HomeostatError."""
    if word is None:
        return None
    try:
        return Level(word)
    except ValueError:
        known = ", ".join(repr(str(level)) for level in Level)
        raise HomeostatError(f"{name}={word!r}: no such level. Use {known} or None.") from None


def rules_without(ignore: Sequence[str]) -> tuple[Rule, ...]:
    """Return all rules except those with one of these codes or names. Raises HomeostatError."""
    known = {word for rule in RULES for word in (rule.code, rule.name)}
    unknown = [word for word in ignore if word not in known]
    if unknown:
        raise HomeostatError(
            f"ignore={unknown[0]!r}: no rule has this code or name. `homeostat rules` lists them."
        )
    return tuple(rule for rule in RULES if not {rule.code, rule.name} & set(ignore))


class LiveDoctor:
    """Judge the records of one run of a framework while it runs."""

    def __init__(
        self,
        *,
        run: str,
        framework: Framework,
        settings: Mapping[str, Any],
        total_steps: int | None,
        level: Level = Level.WARN,
        stop_on: Level | None = None,
        ignore: Sequence[str] = (),
        file: Path | None = None,
        webhook: str | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """`settings` are the run's by the framework's names; `file` gets a line per message."""
        self.stop_finding: Finding | None = None
        self.num_records = 0
        self._framework = framework
        self._raw = flat(settings)
        self._rules = rules_without(ignore)
        self._total_steps = total_steps
        self._stop_on = stop_on
        self._file = file
        self._facts = dict(facts or {})
        self._monitor: Monitor | None = None
        self._waiting: list[tuple[int, dict[str, float]]] = []
        self._names: dict[str, str] = {}
        self._reported_broken: set[str] = set()
        self._teller = Teller(run=mask_text(run), level=level)
        self._sender = Sender([Webhook(webhook)] if webhook else [], tell=_failed_to_send)
        self._pace = Pace(time.monotonic(), allowance_s=_ALLOWANCE_S)

    @property
    def spent_s(self) -> float:
        """Return the seconds that judging took so far."""
        return self._pace.spent_s

    @property
    def open(self) -> list[Finding]:
        return self._monitor.open if self._monitor is not None else []

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take in records of an earlier part of the run, which are not judged."""
        for record in records:
            row = row_of(record)
            if row is not None and row.step is not None and row.kind is not RowKind.SUMMARY:
                self._keep(row.step, row.values, is_train=row.kind is RowKind.TRAIN)

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take in what the trainer logged at a step, and tell what changed."""
        started = time.monotonic()
        row = row_of({**{name: _plain(value) for name, value in metrics.items()}, "step": step})
        if row is None or row.kind is RowKind.SUMMARY:
            return
        self._keep(step, row.values, is_train=row.kind is RowKind.TRAIN)
        if self._monitor is not None and self._pace.is_due(started):
            self._judge(self._monitor, step)
        now = time.monotonic()
        self._pace.looked(now, now - started)

    def close(self) -> None:
        """Judge what was kept back, and send what waits."""
        if self._monitor is not None and self._waiting:
            self._judge(self._monitor, self._waiting[-1][0])
        self._sender.close()

    def _keep(self, step: int, values: Mapping[str, float], *, is_train: bool) -> None:
        self.num_records += 1
        self._waiting.append((step, self._renamed(values)))
        if self._monitor is None and (is_train or len(self._waiting) >= _MAX_WAITING):
            self._monitor = self._new_monitor()

    def _renamed(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return a row by our names, in our units. A name keeps the meaning it had first."""
        if not values.keys() <= self._names.keys():
            once = dict.fromkeys((*self._names, *values), 1)
            found = translation(once, self._framework)
            taken = set(self._names.values())
            for name in values.keys() - self._names.keys():
                ours_ = found[name]
                self._names[name] = ours_ if ours_ not in taken else f"raw/{name}"
        scales = self._framework.scales
        named = ((self._names[name], name, value) for name, value in values.items())
        return {key: value * scales.get(key, 1.0) if key != name else value
                for key, name, value in named}  # fmt: skip

    def _new_monitor(self) -> Monitor:
        settings = ours(self._raw, self._framework)
        names = {name for _, row in self._waiting for name in row} | set(self._names)
        kind: Kind = kind_of(names, {**self._raw, **settings}, log=Log(), framework=self._framework)
        monitor = Monitor(
            self._rules,
            kind=kind,
            settings=settings,
            total_steps=self._total_steps,
            framework=self._framework,
            raw_settings=self._raw,
        )
        monitor.facts.update(self._facts)
        return monitor

    def _judge(self, monitor: Monitor, step: int) -> None:
        """Evaluate the rules on everything that was kept since their last evaluation."""
        *earlier, (last, row) = self._waiting
        self._waiting = []
        for number, values in earlier:
            monitor.add(number, values)
        self._report(monitor.observe(last, row))
        for code in monitor.broken.keys() - self._reported_broken:
            self._reported_broken.add(code)
            say(f"homeostat: rule {code} failed and is off: {mask_text(monitor.broken[code])}")

    def _report(self, changes: list[Change]) -> None:
        for message in self._teller.messages(changes, self._framework):
            self._tell(message)
        for change in changes:
            grave = self._stop_on is not None and change.finding.level.rank >= self._stop_on.rank
            if grave and change.state is State.OPEN and self.stop_finding is None:
                self.stop_finding = change.finding

    def _tell(self, message: Message) -> None:
        say("\n".join(message.lines(color=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))))
        found = message.as_json()
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
        self._sender.send(found)


def _plain(value: Any) -> Any:
    """Return a scalar of numpy or torch as a number of Python's, and anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _failed_to_send(why: str) -> None:
    say(f"homeostat: {why}.")


class Guard:
    """Call the doctor from a trainer: after the first error it is off, and training continues."""

    def __init__(self) -> None:
        self.failure: str = ""

    def call(self, work: Callable[..., None], *values: Any) -> None:
        if self.failure:
            return
        try:
            work(*values)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            say(
                f"homeostat: the doctor failed and is off; the training run is not affected. "
                f"Cause: {mask_text(self.failure)}"
            )
