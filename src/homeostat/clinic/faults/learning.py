"""Faults of the updates: learning rates, schedules, and weights that move too little or too far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from homeostat.clinic import bodies
from homeostat.clinic.around_step import around_step
from homeostat.clinic.injector import FROM_START, SORT, SORT_SFT, Cure, Injector
from homeostat.clinic.recipes import Body, Raw, put
from homeostat.health.finding import Family
from homeostat.run.session.session import Session
from homeostat.types import Role


class RateTooHigh(Injector):
    """The learning rate of SFT has two or three zeros too few."""

    name, family = "lr_too_high", Family.LEARNING
    expects = ("lr-too-high", "loss-divergence", "update-too-large")
    body, onset, strength = SORT_SFT, FROM_START, (100.0, 1000.0)
    cure, vital = Cure.ALL, "train/loss"

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["trainer"]["lr"] *= self.dose.strength


class RateTooHighInRl(Injector):
    """The learning rate of a policy is far too high."""

    name, family = "lr_too_high_rl", Family.LEARNING
    expects = ("lr-too-high", "policy-collapse", "update-too-large")
    onset, strength = FROM_START, (30.0, 300.0)
    cure, vital = Cure.ALL, "reward"

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["trainer"]["lr"] *= self.dose.strength


class RateTenfoldInRl(Injector):
    """The learning rate of a policy has one zero too few: its first updates wreck it."""

    name, family = "lr_tenfold_rl", Family.LEARNING
    expects = ("lr-too-high", "policy-collapse", "update-too-large")
    body, onset, strength = Body("sort", steps=24), FROM_START, (9.0, 12.0)

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["trainer"]["lr"] *= self.dose.strength


class RateJumps(Injector):
    """From a step on, the optimizer moves many times as far as the schedule says."""

    name, family = "lr_jumps", Family.LEARNING
    expects = ("lr-too-high", "policy-collapse", "update-too-large")
    strength = (30.0, 300.0)
    cure, vital = Cure.ALL, "reward"

    def started(self, parts: Any, session: Session) -> None:
        def faster(rate: float) -> float:
            return rate * self.dose.strength if self.is_ill(parts.state.step + 1) else rate

        around_step(parts, rate=faster)


class RateZero(Injector):
    """The learning rate is 0."""

    name, family = "lr_zero", Family.LEARNING
    expects = ("lr-too-low", "trained-weights-unmoved")
    onset = FROM_START

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["trainer"]["lr"] = 0.0


class RateTooLow(Injector):
    """The learning rate has three or four zeros too many."""

    name, family = "lr_too_low", Family.LEARNING
    expects = ("lr-too-low",)
    body, onset, strength = SORT_SFT, FROM_START, (1e-5, 1e-4)

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["trainer"]["lr"] *= self.dose.strength


class ScheduleTooLong(Injector):
    """The warm-up takes the whole run: the configured learning rate is never reached."""

    name, family = "schedule_horizon", Family.LEARNING
    expects = ("lr-schedule-horizon-wrong", "warm-up-too-long")
    body, onset, strength = SORT_SFT, FROM_START, (0.9, 0.98)

    def prepare(self, raw: Raw, folder: Path) -> None:
        schedule = {"type": "constant", "warmup_share": self.dose.strength}
        put(raw, "trainer.schedule", schedule)


class WeightDecayTooHigh(Injector):
    """Weight decay shrinks the weights faster than the gradient can build them."""

    name, family = "weight_decay", Family.LEARNING
    expects = ("weight-decay-too-high", "loss-plateau", "update-too-large")
    body, onset, strength = SORT_SFT, FROM_START, (20.0, 100.0)

    def prepare(self, raw: Raw, folder: Path) -> None:
        put(raw, "trainer.optimizer", {"type": "adamw", "weight_decay": self.dose.strength})


class NoClipping(Injector):
    """There is no gradient clipping, no warm-up, and a rate that needs both."""

    name, family = "no_clipping", Family.LEARNING
    expects = ("lr-too-high", "no-gradient-clipping", "grad-norm-explosion", "loss-divergence")
    body, onset, strength = SORT_SFT, FROM_START, (30.0, 100.0)
    cure, vital = Cure.ALL, "train/loss"

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["trainer"]["lr"] *= self.dose.strength
        raw["trainer"]["max_grad_norm"] = None
        put(raw, "trainer.schedule.warmup_steps", 0)


class FrozenLayers(Injector):
    """Some layers lost requires_grad without the optimizer knowing."""

    name, family = "frozen_layers", Family.LEARNING
    expects = ("trained-weights-unmoved", "no-gradient-flow")
    body, onset = SORT_SFT, (6, 14)

    def before_step(self, step: int, parts: Any) -> None:
        if self.strikes(step):
            for name, param in parts.trainer.roles[Role.POLICY].model.causal_lm.named_parameters():
                if ".layers.0." in name:
                    param.requires_grad_(False)


class WeightsStay(Injector):
    """Gradients arrive, but the optimizer moves nothing: its learning rate is 0."""

    name, family = "weights_stay", Family.LEARNING
    expects = ("trained-weights-unmoved", "no-gradient-flow")

    def started(self, parts: Any, session: Session) -> None:
        def stopped(rate: float) -> float:
            return 0.0 if self.is_ill(parts.state.step + 1) else rate

        around_step(parts, rate=stopped)


class Overfitting(Injector):
    """A handful of rows is shown again and again."""

    name, family = "overfitting", Family.LEARNING
    expects = ("overfitting", "data-repeated")
    body, onset, strength = SORT_SFT, FROM_START, (8.0, 32.0)

    def prepare(self, raw: Raw, folder: Path) -> None:
        file = folder / "train.jsonl"
        bodies.write_rows(file, bodies.read_rows(file)[: round(self.dose.strength)])
        raw["trainer"] |= {"batch_rows": 8, "max_steps": 80}
        raw["eval"]["interval_steps"] = 4


class GradientSpikes(Injector):
    """Now and then a gradient is damaged, as if a bit had flipped."""

    name, family, expects = "gradient_spikes", Family.LEARNING, ("grad-norm-spikes",)
    strength = (300.0, 3000.0)

    def started(self, parts: Any, session: Session) -> None:
        def damage(grad: torch.Tensor) -> torch.Tensor:
            since = parts.state.step + 1 - self.dose.onset
            return grad * self.dose.strength if since >= 0 and since % 4 == 0 else grad

        parts.trainer.roles[Role.POLICY].model.output_weight().register_hook(damage)


class WeightsDrift(Injector):
    """Every update is followed by noise in the weights: the policy forgets."""

    name, family = "weights_drift", Family.POLICY
    expects = ("policy-collapse", "entropy-explosion", "reward-collapse")
    body, strength = SORT, (0.02, 0.05)

    def after_update(self, step: int, parts: Any) -> None:
        if not self.is_ill(step):
            return
        torch.manual_seed(step)
        with torch.no_grad():
            for param in parts.trainer.roles[Role.POLICY].model.causal_lm.parameters():
                param.add_(self.dose.strength * torch.randn_like(param))


FAULTS: tuple[type[Injector], ...] = (
    RateTooHigh,
    RateTooHighInRl,
    RateTenfoldInRl,
    RateJumps,
    RateZero,
    RateTooLow,
    ScheduleTooLong,
    WeightDecayTooHigh,
    NoClipping,
    FrozenLayers,
    WeightsStay,
    Overfitting,
    GradientSpikes,
    WeightsDrift,
)
