"""Faults in which a part of the weights does not reach the engine, or does not stay there."""

from __future__ import annotations

from typing import Any

import torch

from homeostat.clinic.faults.engine import part_ways
from homeostat.clinic.injector import FROM_START, Injector
from homeostat.clinic.recipes import FEW_PROMPTS, Body, Raw
from homeostat.health.finding import Family
from homeostat.types import Role

LORA: Raw = {"lora": {"rank": 8, "targets": ["all-linear"]}, "trainer.lr": 1e-2}
LORA_RL = Body("sort", steps=16, changes=LORA | FEW_PROMPTS)
SLEEPS = Body("sort", steps=24, changes=FEW_PROMPTS | {"engine": {"type": "native", "sleep": True}})
# Parts of a model that a conversion of names may forget.
PARTS = ("lm_head.", "embed_tokens.", ".layers.0.", ".layers.1.", ".mlp.", ".self_attn.")


class AdapterStaysBehind(Injector):
    """The engine is sent the base weights only: it never sees the adapter that is trained."""

    name, family, expects = "lora_not_synced", Family.SYNC, ("lora-not-synced",)
    body, onset = LORA_RL, FROM_START

    def before_step(self, step: int, parts: Any) -> None:
        if self.strikes(step):
            # The adapter is still 0, so that this is the base model, now and later.
            part_ways(parts.engine)


class _Partial(Injector):
    """Publications reach the engine except for a part of the tensors."""

    family = Family.SYNC

    def is_left_out(self, name: str) -> bool:
        raise NotImplementedError

    def before_step(self, step: int, parts: Any) -> None:
        if not self.is_ill(step):
            return
        if self.strikes(step):
            self.model = part_ways(parts.engine)
        published = dict(parts.trainer.roles[Role.POLICY].model.causal_lm.named_parameters())
        with torch.no_grad():
            for name, param in self.model.causal_lm.named_parameters():
                if not self.is_left_out(name):
                    param.copy_(published[name])
                elif self.loses:
                    param.zero_()

    loses = False


class PartStaysBehind(_Partial):
    """A part of the model keeps the weights that the engine started with; the rest is current."""

    name, onset, strength = "part_not_synced", FROM_START, (1.0, 6.99)
    expects = ("weights-not-updated", "engine-weights-differ", "train-infer-logprob-drift")
    body = Body("sort", steps=20, changes=FEW_PROMPTS | {"trainer.lr": 2e-3})

    def is_left_out(self, name: str) -> bool:
        return PARTS[int(self.dose.strength) - 1] in name


class SleepLosesWeights(_Partial):
    """The engine frees the memory of a layer when it sleeps, and wakes with zeros in its place."""

    name, body, loses = "sleep_loses_weights", SLEEPS, True
    expects = ("sleep-wake-weights-lost",)

    def is_left_out(self, name: str) -> bool:
        return ".layers.1.mlp." in name


FAULTS: tuple[type[Injector], ...] = (AdapterStaysBehind, PartStaysBehind, SleepLosesWeights)
