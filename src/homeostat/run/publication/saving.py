"""Save a run: checkpoints to resume from, and weights in the Hugging Face format to use."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from homeostat.config.kind import RunKind
from homeostat.config.parts import SavingSettings
from homeostat.errors import CheckpointWriteError, DiskFullError
from homeostat.health.finding import Grade
from homeostat.health.remedies import Action
from homeostat.run.session.session import Session
from homeostat.train.saving.checkpoint import Write
from homeostat.types import Role

if TYPE_CHECKING:
    from homeostat.run.wiring.rl_setup import RlParts
    from homeostat.run.wiring.sft_setup import Parts

log = logging.getLogger(__name__)


class Saved(Protocol):
    """A part that writes additional files into a checkpoint."""

    @property
    def state_bytes(self) -> int: ...

    def save(self, folder: Path) -> None: ...


class Saver:
    """Writes, prunes and reports checkpoints. A failed save never ends a run that can continue."""

    def __init__(
        self,
        config: SavingSettings,
        parts: Parts | RlParts,
        session: Session,
        *,
        also: Sequence[Saved] = (),
    ) -> None:
        """The state of `also` is saved in addition to the trainer's."""
        self.also = also
        self.config = config
        self.parts = parts
        self.session = session
        self.store = session.checkpoints
        self._seconds = 0.0
        self._point_to_best()

    def _point_to_best(self) -> None:
        """Make checkpoints/best point to the best step."""
        # The link is out of date if the run was killed right after a save, or was rolled back.
        best_step = self.parts.state.best_step
        if best_step is None or not self.config.eval.keep_best:
            return
        try:
            self.store.mark_best(best_step)
        except OSError as error:
            log.error("checkpoints/best was not set to step %d: %s", best_step, error)

    def take_seconds(self) -> float:
        """Return the seconds spent on saving since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def after_step(
        self, sections: Callable[[], dict[str, Any]], *, at_end: bool, is_best: bool
    ) -> tuple[bool, bool]:
        """Save if that is due. Return whether it was saved, and whether the run ends here."""
        config, last = self.config, at_end or self.session.must_end
        due = self.parts.state.step % config.checkpoint.interval_steps == 0
        if not (last or due or (is_best and config.eval.keep_best)):
            return False, False
        saved = self.save(sections(), at_end=at_end, must=last)
        # If the request to end came during the save, the step need not be saved a second time.
        return saved, last or (saved and self.session.must_end)

    def save(self, sections: dict[str, Any], *, at_end: bool, must: bool) -> bool:
        """Write a checkpoint of the current step. Return whether it is in place.

        `sections` is the state of the loop itself. With `must` a failure is raised, because no
        later save follows.
        """
        recorder = self.session.recorder
        recorder.flush()
        export = self.config.checkpoint.export
        with_export = export == "every" or (export == "final" and at_end)
        try:
            self._save(sections, with_export=with_export)
        except CheckpointWriteError as error:
            recorder.event("checkpoint_failed", self.parts.state.step, error=str(error))
            saved = with_export and self._saved_without_export(sections)
            if must:
                raise
            log.error("%s Training continues.", error)
            return saved
        return True

    def _saved_without_export(self, sections: dict[str, Any]) -> bool:
        """Save what a resume needs where there was no room for an export beside it."""
        try:
            self._save(sections, with_export=False)
        except CheckpointWriteError:
            return False
        log.error(
            "Step %d is saved without its export. Make room and run the same command again, or use "
            "homeostat export.",
            self.parts.state.step,
        )
        return True

    def _save(self, sections: dict[str, Any], *, with_export: bool) -> None:
        """Write a checkpoint and report it. Raises CheckpointWriteError."""
        recorder, step = self.session.recorder, self.parts.state.step
        started = time.perf_counter()
        health = self.session.health_state()
        record = {"run": self.parts.state.as_json(), "health": health, **sections}

        def write(folder: Path) -> None:
            self.parts.trainer.save(folder)
            for part in self.also:
                part.save(folder)
            if with_export:
                self._export(folder)

        is_best = self.parts.state.best_step == step
        with self.session.timeline.phase("checkpoint", step=step):
            path = self._put(write, record, best=is_best and self.config.eval.keep_best)
        seconds = time.perf_counter() - started
        self._seconds += seconds
        recorder.event("checkpoint_saved", step, path=str(path), seconds=seconds, best=is_best)
        if with_export:
            recorder.event("export_written", step, path=str(path / "hf"))
        self._prune(step)

    def _export(self, folder: Path) -> None:
        """Write the weights, and those of a critic that is exported, as Hugging Face folders."""
        trainer, tokenizer = self.parts.trainer, self.parts.tokenizer
        settings, critic = self.config.for_export, self.config.critic
        trainer.export(Role.POLICY, folder / "hf", settings)
        tokenizer.save(folder / "hf", scores=self.config.kind is RunKind.REWARD_MODEL)
        if critic is not None and critic.export:
            of_critic = replace(settings, model=critic.start(settings.model))
            trainer.export(Role.CRITIC, folder / "hf_critic", of_critic)
            tokenizer.save(folder / "hf_critic", scores=True)

    def _put(self, write: Write, record: dict[str, Any], *, best: bool) -> Path:
        """Save to the store. If the disk is full, make room and try a second time."""
        num_bytes = self.parts.trainer.state_bytes + sum(part.state_bytes for part in self.also)

        def put() -> Path:
            step = self.parts.state.step
            return self.store.save(step, write, record, num_bytes=num_bytes, best=best)

        try:
            return put()
        except DiskFullError as error:
            if not self._make_room(error):
                raise
            return put()

    def _make_room(self, error: DiskFullError) -> bool:
        """Remove checkpoints that are too many once this one is saved. Return whether any were."""
        limits, step = self.config.checkpoint, self.parts.state.step
        if self.config.health.heal == "off":
            return False
        try:
            removed = self.store.make_room(keep_last=limits.keep_last)
        except OSError as why:
            log.error("old checkpoints were not removed: %s", why)
            return False
        if not removed:
            return False
        recorder = self.session.recorder
        recorder.event("checkpoint_pruned", step, removed=removed)
        facts = {"code": "", "cause": str(error), "remedy": str(Action.PRUNE_CHECKPOINTS)}
        facts |= {"path": "", "old": None, "new": None, "grade": str(Grade.SAFE), "window": 0}
        recorder.event("remedy_applied", step, **facts)
        return True

    def add_missing_export(self, sections: dict[str, Any]) -> None:
        """Save the last step of a complete run again if HF weights are wanted but missing."""
        path = self.store.path(self.parts.state.step)
        if self.config.checkpoint.export != "off" and not (path / "hf").is_dir():
            self.save(sections, at_end=True, must=True)

    def _prune(self, step: int) -> None:
        limits = self.config.checkpoint
        try:
            removed = self.store.prune(keep_last=limits.keep_last, max_bytes=limits.max_bytes)
        except OSError as error:
            log.error("old checkpoints were not removed: %s", error)
            return
        if removed:
            self.session.recorder.event("checkpoint_pruned", step, removed=removed)
