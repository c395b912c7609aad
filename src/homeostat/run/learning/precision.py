"""Set the precision of each step in the trainer, and decide whether the step is measured.

A remedy may move the first step in low precision, so the settings in force decide, not the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from homeostat.arrays import FloatArray
from homeostat.config.fp8 import Fp8Config
from homeostat.config.int4 import Int4Config
from homeostat.config.loading.live import LiveConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.run.healing.watch import Watch
from homeostat.run.learning.updates import step_rows
from homeostat.train.events import EmitEvent
from homeostat.train.inspection.precision_probe import UNQUANTISED
from homeostat.train.scoring import score
from homeostat.train.trainer import Trainer
from homeostat.types import Role, RolloutGroup, TrainBatch

# Steps after the first one in low precision that are always measured.
NUM_FIRST = 3
# Samples of a measured step that are scored with and without quantisation (RL).
NUM_SAMPLES = 16


class PrecisionSchedule:
    """The precision of each step of a run."""

    def __init__(
        self, live: LiveConfig, *, trainer: Trainer, emit: EmitEvent, was_on: bool = False
    ) -> None:
        """`was_on`: the steps before were in low precision, and the switch is on record."""
        self._live, self._trainer, self.emit = live, trainer, emit
        self._was_on, self._measures = was_on, False

    @classmethod
    def resumed(
        cls, live: LiveConfig, *, trainer: Trainer, emit: EmitEvent, watch: Watch
    ) -> PrecisionSchedule:
        """Return the schedule of a run that continues after the last step that was watched.

        A switch is recorded once: a second record would look like a run that began without it.
        """
        was_on = "precision_switched" in watch.past_events and is_low(
            live.now.trainer, watch.last_step
        )
        return cls(live, trainer=trainer, emit=emit, was_on=was_on)

    def begin(self, step: int) -> None:
        """Switch layers to the precision of the step that begins."""
        config = self._live.now
        interval = config.observe.precision_interval
        self._measures = is_measured(config.trainer, step, interval=interval)
        account = self._begin(step, observes=self._measures)
        if account and not self._was_on:
            self.emit("precision_switched", step, **account)
        self._was_on = bool(account)

    @contextmanager
    def shadow(self, step: int) -> Iterator[None]:
        """Compute without quantisation inside the block."""
        self._trainer.begin_step(UNQUANTISED)
        try:
            yield
        finally:
            self._begin(step)

    def sampled(self, groups: Sequence[RolloutGroup], *, step: int) -> dict[str, float]:
        """Score some samples of a measured step with and without quantisation (RL)."""
        if not self._measures:
            return {}
        config = self._live.now
        rows = [row for row in step_rows(groups, config.for_learning).rows if row.weights_T.any()]
        chosen = rows[:: max(1, len(rows) // NUM_SAMPLES)][:NUM_SAMPLES]
        if not chosen:
            return {}
        batches = [TrainBatch.of([row]) for row in chosen]
        heat = config.rollout.temperature
        found = _loss(score(self._trainer, Role.POLICY, batches, temperature=heat))
        with self.shadow(step):
            shadow = _loss(score(self._trainer, Role.POLICY, batches, temperature=heat))
        return shadow_metrics({"eval/loss": found}, {"eval/loss": shadow})

    def _begin(self, step: int, *, observes: bool = False) -> dict[str, Any]:
        return begin_precision(self._trainer, self._live.now.trainer, step, observes=observes)

    def begins_int4(self, step: int) -> bool:
        """Return whether weights that were trained unrounded so far are rounded from a step on."""
        int4 = self._live.now.trainer.int4
        return int4 is not None and step == int4.start_step and step > 1

    def is_on(self, step: int) -> bool:
        """Return whether layers are quantised at a step."""
        return is_low(self._live.now.trainer, step)


def begin_precision(
    trainer: Trainer, settings: TrainerConfig, step: int, *, observes: bool = False
) -> dict[str, Any]:
    """Compute as a step does under the settings in force. Returns what is quantised then."""
    counted = step if is_low(settings, step) else UNQUANTISED
    fp8 = settings.fp8
    ends = None if fp8 is None else (fp8.skip_first, fp8.skip_last)
    return trainer.begin_step(counted, observes=observes, ends=ends)


def _loss(logp: Sequence[FloatArray]) -> float:
    return -float(np.concatenate(logp).mean(dtype=np.float64))


def shadow_metrics(found: Mapping[str, float], shadow: Mapping[str, float]) -> dict[str, float]:
    """Compare an evaluation with that of the same rows and weights without quantisation."""
    loss = shadow["eval/loss"]
    return {"eval/bf16_shadow_loss": loss, "eval/quantised_gap": found["eval/loss"] - loss}


def low_precision(trainer: TrainerConfig) -> Fp8Config | Int4Config | None:
    """Return the settings of quantised layers; None if there are none."""
    return trainer.fp8 or trainer.int4


def is_low(trainer: TrainerConfig, step: int) -> bool:
    """Return whether a step is computed with quantised layers."""
    config = low_precision(trainer)
    return config is not None and step >= config.start_step


def is_measured(trainer: TrainerConfig, step: int, *, interval: int | None) -> bool:
    """Return whether quantised layers are measured at a step: the first few, then regularly."""
    config = low_precision(trainer)
    if config is None or interval is None or step < config.start_step:
        return False
    return step < config.start_step + NUM_FIRST or step % interval == 0
