"""Treat illnesses while a run is training: one remedy at a time, recorded and judged.

    open findings -> the first remedy that may be tried -> in force -> its window -> helped, or
    reverted -> the next one

`health.heal` limits which remedies are applied. An edit is a value that replaces the recipe's until
it is reverted. All edits, the current trial and earlier trials are part of a checkpoint, so a
resumed run continues with them. A remedy that a running run cannot apply is not tried: it stays
advice in the finding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from homeostat.config.loading.edits import value_at
from homeostat.config.loading.live import Edit, LiveConfig
from homeostat.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteHaltError,
    PolicyNotFiniteError,
)
from homeostat.health.finding import Confidence, Family, Finding, Grade, Level
from homeostat.health.remedies import (
    LR_FAR_LOWER,
    Action,
    ConfigEdit,
    Remedy,
    Signs,
    is_better,
    remedies_for,
)
from homeostat.run.healing.watch import Watch, settings_of
from homeostat.train.events import EmitEvent

# How many times a run may be rolled back. If it fails more often, a person must look at it.
MAX_ROLL_BACKS = 3
# An illness so soon after going back means that the checkpoint is at fault itself.
STEPS_AT_ONCE = 3
# A remedy that did not help is not tried again.
GIVEN_UP = 2**31
# Errors that end a run before any rule can report them.
NOT_FINITE = Finding(
    "", "nan-loss", Family.NUMERICS, Level.ERROR, Confidence.MEASURED, message="not finite"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Done:
    """The change that an action or an edit made, if it can be reverted."""

    path: str = ""
    old: Any = None
    new: Any = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A remedy whose time is not over yet."""

    code: str
    subject: str
    cause: str
    remedy: str
    action: str
    path: str
    old: Any
    new: Any
    step: int
    window: int
    metric: str
    better: str
    before: float | None
    doses: int = 1

    @property
    def label(self) -> str:
        return _label(self.code, self.subject, self.remedy)

    def facts(self) -> dict[str, Any]:
        return {"code": self.code, "cause": self.cause, "remedy": self.remedy}


@dataclass(slots=True)
class Healing:
    """The state of healing that a checkpoint saves."""

    overlay: dict[str, Edit] = field(default_factory=dict)
    trial: Trial | None = None
    # How often each remedy was tried, by finding and remedy.
    tried: dict[str, int] = field(default_factory=dict)
    # What was there before the first of several doses, of which none has helped so far.
    origins: dict[str, Any] = field(default_factory=dict)
    roll_backs: int = 0
    # The step that it went back to last.
    went_to: int | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], *, place: str) -> Healing:
        try:
            trial, went_to = fields.get("trial"), fields.get("went_to")
            tried = fields.get("tried", {}).items()
            return cls(
                overlay={path: Edit(**edit) for path, edit in fields.get("overlay", {}).items()},
                trial=None if trial is None else _trial(trial),
                tried={str(name): _count(number, "tried") for name, number in tried},
                origins=dict(fields.get("origins", {})),
                roll_backs=_count(fields.get("roll_backs", 0), "roll_backs"),
                went_to=None if went_to is None else _count(went_to, "went_to"),
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{place}: health.healing cannot be read: {error}.") from None


def _trial(fields: Mapping[str, Any]) -> Trial:
    trial = Trial(**fields)
    for name in ("step", "window", "doses"):
        _count(getattr(trial, name), f"trial.{name}")
    return trial


def _count(value: Any, name: str) -> int:
    """Return a number of steps or times. A file may hold anything: inf, 1.5, true."""
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{name} is {value!r:.40}, not a whole number")
    return value


class RollBackError(Exception):
    """Leave the loop: the run is to continue from an earlier step. Never reaches a user."""

    def __init__(self, step: int, healing: Healing) -> None:
        super().__init__(f"back to step {step}")
        self.step = step
        self.healing = healing


class Actions(Protocol):
    """The actions that a run offers to remedies while it is running."""

    def act(self, action: str) -> Done | None:
        """Perform an action; None if this run has no such action or nothing is left to do."""

    def undo(self, action: str, old: Any) -> bool:
        """Undo an action, and return whether that was possible."""
        ...

    def healthy_step(self, *, before: int) -> int | None:
        """Return the newest valid checkpoint of an earlier step that was saved in good health."""


class Healer:
    """Tries remedies between steps. Edits go into `live`, actions to `actions`."""

    def __init__(
        self,
        live: LiveConfig,
        *,
        watch: Watch,
        emit: EmitEvent,
        actions: Actions,
        healing: Healing,
    ) -> None:
        self.live = live
        self.healing = healing
        self._mode = live.recipe.health.heal
        self._watch = watch
        self.emit = emit
        self._actions = actions
        live.on_change(lambda: watch.monitor.reconfigure(settings_of(live.now)))
        live.adopt(healing.overlay)
        if healing.overlay:
            self._resume_edits()

    def treat(self, step: int) -> None:
        """Judge the remedy on trial; if none is on trial, try one for an open finding."""
        if self._mode == "off":
            return
        if self.healing.trial is not None:
            self._judge(self.healing.trial, step)
        if self.healing.trial is None:
            self._try_next(step)

    @contextmanager
    def rescuing(self) -> Iterator[None]:
        """Roll the run back, if allowed, instead of ending it because of non-finite numbers."""
        try:
            yield
        except (NonFiniteHaltError, PolicyNotFiniteError) as error:
            # A recipe that says `halt` means it.
            may = self._mode == "all" and self.live.recipe.trainer.on_nonfinite == "skip"
            step = self._watch.last_step + 1
            target = self._target(step) if may else None
            if target is None:
                raise
            log.warning("%s\nThe run goes back to step %d (health.heal=all).", error, target)
            again = self.healing.roll_backs > 0
            done = self._edit(LR_FAR_LOWER, target + 1, NOT_FINITE) if again else None
            facts = {"code": "", "cause": str(error), "remedy": "roll-back"}
            grade = {"grade": str(Grade.UNSAFE), "window": 0}
            self.emit("remedy_applied", step, **facts, **asdict(done or Done()), **grade)
            self._leave(target, step, code="", cause="numbers that are not finite", done=done)

    def _target(self, began: int) -> int | None:
        """Return the step to roll back to from an illness, or None.

        If that was just tried, it is an earlier step: the weights saved there may be at fault.
        """
        last = self.healing.went_to
        if self.healing.roll_backs >= MAX_ROLL_BACKS:
            return None
        if last is not None and last < began <= last + STEPS_AT_ONCE:
            earlier = self._actions.healthy_step(before=last)
            return last if earlier is None else earlier
        return self._actions.healthy_step(before=began)

    def _resume_edits(self) -> None:
        if self._mode == "off":
            for path, edit in list(self.live.edits.items()):
                self._revert(path, why="health.heal=off", step=edit.step)
            self.healing.trial = None
        else:
            shown = ", ".join(f"{path}={e.value}" for path, e in self.live.edits.items())
            log.warning("a remedy is in force over the recipe: %s", shown)

    def _try_next(self, step: int) -> None:
        for finding in self._watch.monitor.open:
            for remedy in remedies_for(finding):
                if self._may_try(finding, remedy) and self._apply(finding, remedy, step):
                    return

    def _may_try(self, finding: Finding, remedy: Remedy) -> bool:
        allowed = remedy.grade is Grade.SAFE or self._mode == "all"
        label = _label(finding.code, finding.subject, remedy.name)
        return allowed and self.healing.tried.get(label, 0) < remedy.most

    def _apply(self, finding: Finding, remedy: Remedy, step: int) -> bool:
        """Apply a remedy; return False if this run cannot do it."""
        if remedy.action is Action.ROLL_BACK:
            return self._roll_back(finding, remedy, step)
        before = self._mean(remedy.metric, until=step, count=remedy.window)
        if remedy.action is not None:
            done = self._actions.act(remedy.action)
        else:
            assert remedy.edit is not None, "a remedy is an action or an edit"
            done = self._edit(remedy.edit, step, finding)
        if done is None:
            return False
        self._begin_trial(finding, remedy, done, step=step, before=before)
        return True

    def _begin_trial(
        self,
        finding: Finding,
        remedy: Remedy,
        done: Done,
        *,
        step: int,
        before: float | None,
        window: int = 0,
    ) -> None:
        trial = Trial(
            code=finding.code,
            subject=finding.subject,
            cause=finding.name,
            remedy=remedy.name,
            action=str(remedy.action or ""),
            path=done.path,
            old=done.old,
            new=done.new,
            step=step,
            window=window or remedy.window,
            metric=remedy.metric,
            better=remedy.better,
            before=before,
            doses=remedy.doses,
        )
        self.healing.trial = trial
        self.healing.tried[trial.label] = self.healing.tried.get(trial.label, 0) + 1
        self.healing.origins.setdefault(trial.label, done.old)
        changed = {"path": done.path, "old": done.old, "new": done.new}
        fields = {**trial.facts(), **changed, "grade": str(remedy.grade), "window": trial.window}
        self.emit("remedy_applied", step, **fields)

    def _edit(self, edit: ConfigEdit, step: int, finding: Finding) -> Done | None:
        if not self.live.can_edit(edit.path):
            return None
        config = self.live.now
        old = value_at(config, edit.path)
        signs = Signs(finding, self._watch.monitor.metrics, config.model.init == "random")
        new = edit.new_value(old, signs)
        if new is None:
            return None
        try:
            self.live.edit(edit.path, new, step=step)
        except ConfigError as error:
            log.info("a remedy cannot be tried: %s", error)
            return None
        return Done(edit.path, old, new)

    def _judge(self, trial: Trial, step: int) -> None:
        key = (trial.code, trial.subject)
        is_open = any(finding.key == key for finding in self._watch.monitor.open)
        went_back = trial.action == Action.ROLL_BACK
        # After going back nothing is open: it may come again, and where it does, that is all there
        # is to know. Anything else is over when its finding is.
        if step - trial.step < trial.window and is_open != went_back:
            return
        after = self._mean(trial.metric, until=step, count=max(1, trial.window // 2))
        is_less = not went_back and is_better(trial.before, after, better=trial.better)
        helped = not is_open or is_less
        self.healing.trial = None
        measured = {"metric": trial.metric, "before": trial.before, "after": after}
        self.emit("remedy_judged", step, **trial.facts(), helped=helped, **measured)
        if helped:
            self.healing.origins.pop(trial.label, None)
        elif not self._dosed_again(trial, step):
            self.healing.tried[trial.label] = GIVEN_UP
            self._take_back(trial, step)

    def _dosed_again(self, trial: Trial, step: int) -> bool:
        """Apply the same remedy once more if that is allowed; return whether it was applied."""
        if self.healing.tried[trial.label] >= trial.doses:
            return False
        key, same = (trial.code, trial.subject), (trial.remedy, trial.metric)
        return any(
            self._may_try(finding, remedy) and self._apply(finding, remedy, step)
            for finding in self._watch.monitor.open
            if finding.key == key
            for remedy in remedies_for(finding)
            if (remedy.name, remedy.metric) == same
        )

    def _take_back(self, trial: Trial, step: int) -> None:
        """Restore the value from before the remedy was first applied."""
        old = self.healing.origins.pop(trial.label, trial.old)
        facts = {**trial.facts(), "path": trial.path, "old": trial.new, "new": old}
        why = f"{trial.metric} is no better after {trial.window} steps"
        if trial.path in self.live.edits:
            if old == self.live.recipe_value(trial.path):
                self.live.revert(trial.path)
            else:
                self.live.edit(trial.path, old, step=step)
        elif not self._actions.undo(trial.action, old):
            return
        self.emit("remedy_reverted", step, **facts, why=why)

    def _revert(self, path: str, *, why: str, step: int) -> None:
        old = self.live.edits[path].value
        self.live.revert(path)
        facts = {"code": "", "cause": "", "remedy": "edit", "path": path, "why": why}
        facts |= {"old": old, "new": self.live.recipe_value(path)}
        self.emit("remedy_reverted", step, **facts)

    def _roll_back(self, finding: Finding, remedy: Remedy, step: int) -> bool:
        target = self._target(finding.first_step if finding.first_step is not None else step)
        if target is None:
            return False
        before = self._mean(remedy.metric, until=step, count=remedy.window)
        # Where the checkpoint was at fault, what is in force since has not been tried yet.
        last = self.healing.went_to
        edit = remedy.edit if last is None or target >= last else None
        done = self._edit(edit, target + 1, finding) if edit is not None else None
        # The run must pass the step at which the illness was seen before.
        window = step - 1 - target + remedy.window
        first = {"step": target + 1, "before": before, "window": window}
        self._begin_trial(finding, remedy, done or Done(), **first)
        self._leave(target, step, code=finding.code, cause=finding.name, done=done)
        return True

    def _leave(self, target: int, step: int, *, code: str, cause: str, done: Done | None) -> None:
        self.healing.roll_backs += 1
        self.healing.went_to = target
        changed = asdict(done or Done())
        facts = {"code": code, "cause": cause, "from_step": step - 1, "to_step": target}
        self.emit("rolled_back", target, **facts, **changed)
        raise RollBackError(target, self.healing)

    def _mean(self, metric: str, *, until: int, count: int) -> float | None:
        """Over the newest records before a step; None where there is none."""
        series = self._watch.monitor.series(metric)
        values = np.array([]) if series is None else series.before(until).tail(count).values
        finite = values[np.isfinite(values)]
        return float(finite.mean()) if len(finite) else None


def _label(*parts: str) -> str:
    return "/".join(part for part in parts if part)
