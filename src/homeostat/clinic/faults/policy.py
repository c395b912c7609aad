"""Faults of the policy and of sampling."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from homeostat.clinic import bodies
from homeostat.clinic.injector import FROM_START, Cure, Injector
from homeostat.clinic.recipes import Body, Raw, put
from homeostat.health.finding import Family
from homeostat.rollout.engine import Request
from homeostat.rollout.noise import noise_key
from homeostat.run.session.session import Session
from homeostat.types import Role

WITH_KL = Body("sort", steps=60, changes={"algorithm.kl": {"coefficient": 1e-5}})


class ColdSampling(Injector):
    """The sampling temperature is close to 0: all samples of a group are the same."""

    name, family = "temperature_near_zero", Family.POLICY
    expects = ("greedy-sampling", "mode-collapse")
    onset, strength = FROM_START, (0.01, 0.05)
    cure, vital = Cure.ALL, "reward"

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["rollout"]["temperature"] = self.dose.strength


class DuplicateSamples(Injector):
    """All samples of a prompt are drawn with the same noise."""

    name, family = "duplicate_samples", Family.GENERATION
    expects = ("mode-collapse", "zero-std-groups")

    def started(self, parts: Any, session: Session) -> None:
        engine, submit = parts.engine, parts.engine.submit

        def same_noise(request: Request) -> None:
            submit(request)
            step = int(request.id.split("/")[1])
            if self.is_ill(step):
                key = noise_key(request.seed, request.session_key or "")
                engine.life.in_flight[request.id].noise_key = key

        engine.submit = same_noise


class EntropyCollapse(Injector):
    """The logits grow with every update: the policy becomes certain of whatever it says."""

    name, family, expects = "entropy_collapse", Family.POLICY, ("entropy-collapse", "mode-collapse")
    strength = (1.15, 1.4)

    def after_update(self, step: int, parts: Any) -> None:
        if self.is_ill(step):
            with torch.no_grad():
                parts.trainer.roles[Role.POLICY].model.output_weight().mul_(self.dose.strength)


class EntropyBonusTooHigh(Injector):
    """The entropy bonus outweighs the reward: the policy becomes uniform."""

    name, family = "entropy_bonus", Family.POLICY
    expects = ("entropy-explosion", "entropy-bonus-too-high")
    body, onset, strength = Body("sort", steps=60), FROM_START, (0.15, 0.3)

    def prepare(self, raw: Raw, folder: Path) -> None:
        put(raw, "algorithm.entropy_bonus", self.dose.strength)


class KlRunaway(Injector):
    """The reward pays for one word, and the KL penalty is almost 0."""

    name, family, expects = "kl_runaway", Family.POLICY, ("kl-runaway",)
    body, onset, strength = WITH_KL, FROM_START, (3.0, 6.0)
    cure = Cure.ALL

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["rewards"]["functions"] = [{"type": "regex_format", "pattern": "[a-h]+.*"}]
        raw["trainer"]["lr"] *= self.dose.strength
        put(raw, "algorithm.entropy_bonus", 0.05)


class WrongReference(Injector):
    """The reference's weights are not those that the policy starts from."""

    name, family, expects = "wrong_reference", Family.POLICY, ("kl-wrong-reference",)
    body, onset, strength = WITH_KL, FROM_START, (0.3, 1.0)

    def started(self, parts: Any, session: Session) -> None:
        noise = torch.Generator().manual_seed(self.dose.seed)
        model = parts.trainer.roles[Role.REFERENCE].model
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    drawn = torch.randn(weight.shape, generator=noise)
                    weight.add_(drawn.to(weight), alpha=self.dose.strength * float(weight.std()))


class TooManyUpdates(Injector):
    """Many updates are made on the same samples, with bounds too wide to clip any of them."""

    name, family = "many_updates", Family.OFFPOLICY
    expects = ("too-many-updates-per-rollout", "ppo-ratio-exceeds-threshold")
    onset, strength = FROM_START, (1.5, 3.0)
    cure, vital = Cure.ALL, "reward"

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["trainer"]["updates_per_step"] = 8
        raw["trainer"]["lr"] *= self.dose.strength
        raw["algorithm"] |= {"clip_low": 0.99, "clip_high": 50.0}


class Truncated(Injector):
    """rollout.max_new_tokens is below the length of an answer."""

    name, family, expects = "truncated", Family.GENERATION, ("truncation-at-cap",)
    onset, strength = FROM_START, (2.0, 4.4)

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["rollout"]["max_new_tokens"] = round(self.dose.strength)


class WrongEos(Injector):
    """Model, tokenizer and chat template name another end token than the one that was taught."""

    name, family, onset = "wrong_eos", Family.GENERATION, FROM_START
    expects = ("no-eos", "missing-stop-token", "truncation-at-cap")

    def prepare(self, raw: Raw, folder: Path) -> None:
        model = Path(shutil.copytree(raw["model"]["path"], folder / "model"))
        taught, named = (bodies.SYMBOLS.index(one) for one in (bodies.END, bodies.USER))
        for name in ("config.json", "generation_config.json"):
            file = model / name
            text = file.read_text()
            file.write_text(text.replace(f'"eos_token_id": {taught}', f'"eos_token_id": {named}'))
        # A template that ends turns with the taught token would make that one a stop token. It is
        # inside the tokenizer's settings, or in a file beside them.
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            if (file := model / name).exists():
                text = file.read_text().replace('"eos_token": "$"', '"eos_token": "~"')
                file.write_text(text.replace("+ '$'", "+ '~'"))
        raw["model"]["path"] = str(model)


class EosForgotten(Injector):
    """The end token's row of the LM head is damaged: no answer ends any more."""

    name, family = "eos_forgotten", Family.GENERATION
    expects = ("no-eos", "missing-stop-token", "truncation-at-cap")

    def after_update(self, step: int, parts: Any) -> None:
        if not self.is_ill(step):
            return
        with torch.no_grad():
            row_D = parts.trainer.roles[Role.POLICY].model.output_weight()[
                bodies.SYMBOLS.index(bodies.END)
            ]
            if self.strikes(step):
                self.damaged_D = -row_D.clone()
            row_D.copy_(self.damaged_D)


class LimitTooTight(Injector):
    """Right answers end where DAPO's penalty for length is highest: to be right costs more."""

    name, family, onset = "overlong_penalty", Family.POLICY, FROM_START
    expects = ("length-penalty-too-strong",)
    body = Body("sort", "dapo", steps=20, changes={"rollout.max_new_tokens": 6})


FAULTS: tuple[type[Injector], ...] = (
    ColdSampling,
    DuplicateSamples,
    EntropyCollapse,
    EntropyBonusTooHigh,
    KlRunaway,
    WrongReference,
    TooManyUpdates,
    Truncated,
    WrongEos,
    EosForgotten,
    LimitTooTight,
)
