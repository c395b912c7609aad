"""Faults of the learning rate over the run: horizons that are not the run's, and rates too low."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from homeostat.clinic.injector import FROM_START, Injector
from homeostat.clinic.recipes import FEW_PROMPTS, Body, Raw
from homeostat.health.finding import Family
from homeostat.run.session.session import Session

WRONG_HORIZON = ("lr-schedule-horizon-wrong", "lr-decay-misses-run")


def _decaying(kind: str, *, floor: float, steps: int = 50) -> Body:
    schedule = {"type": kind, "warmup_steps": 3, "min_lr_share": floor}
    return Body("sort", "sft", steps=steps, changes={"trainer.schedule": schedule})


class _OtherHorizon(Injector):
    """The schedule was made for `strength` times the steps that the run has."""

    family, onset, expects = Family.LEARNING, FROM_START, WRONG_HORIZON

    def started(self, parts: Any, session: Session) -> None:
        trainer = parts.live.now.trainer
        schedule, peak, share = trainer.schedule, trainer.peak_lr, self.dose.strength

        def rate(step: int, total_steps: int) -> float:
            horizon = max(1, round(share * total_steps))
            if step <= horizon:
                return peak * schedule.factor(step, horizon)
            return peak * schedule.min_lr_share

        # The settings are frozen; the loop asks them for the rate of every step.
        object.__setattr__(trainer, "learning_rate", rate)


class DecayEndsEarly(_OtherHorizon):
    """The decay reaches its floor early, as if steps were counted in micro-batches."""

    name, strength = "schedule_ends_early", (0.2, 0.4)
    body = _decaying("cosine", floor=0.05)


class DecayEndsAtZero(_OtherHorizon):
    """The rate reaches 0 long before the run ends, as after a run that was made longer."""

    name, strength = "schedule_zero_early", (0.3, 0.6)
    body = _decaying("linear", floor=0.0, steps=40)


class DecayEndsLate(_OtherHorizon):
    """The decay is that of a far longer run: the rate is still high when this one ends."""

    name, strength = "schedule_ends_late", (5.0, 12.0)
    body = _decaying("cosine", floor=0.0)


class RateTooLowInRl(Injector):
    """The learning rate of a policy has several zeros too many."""

    name, family, expects = "lr_too_low_rl", Family.LEARNING, ("lr-too-low",)
    body = Body("sort", steps=24, changes=FEW_PROMPTS)
    onset, strength = FROM_START, (1e-5, 3e-4)

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["trainer"]["lr"] *= self.dose.strength


FAULTS: tuple[type[Injector], ...] = (
    DecayEndsEarly,
    DecayEndsAtZero,
    DecayEndsLate,
    RateTooLowInRl,
)
