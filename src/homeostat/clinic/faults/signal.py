"""Faults of the signal: rewards of form or chance, labels at random, a reference that moves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from homeostat.clinic import bodies
from homeostat.clinic.faults.reward import _Reward
from homeostat.clinic.injector import FROM_START, Injector
from homeostat.clinic.recipes import FEW_PROMPTS, Body, Raw
from homeostat.health.finding import Family
from homeostat.run.session.session import Session
from homeostat.types import Role


class FormatOnly(Injector):
    """The form of an answer earns many times what a right one does."""

    name, family, onset = "reward_format_only", Family.REWARD, FROM_START
    expects, strength = ("reward-learns-format-only",), (0.005, 0.02)
    body = Body("sort", steps=40)

    def prepare(self, raw: Raw, folder: Path) -> None:
        # About four in ten sorted numbers begin with 0: a form that is found, and easier to meet
        # than to sort.
        form = {"type": "regex_format", "name": "form", "pattern": "00[0-9]{3}"}
        right = {"type": "exact_match", "name": "right", "weight": self.dose.strength}
        raw["rewards"]["functions"] = [form, right]


class NoiseAsReward(_Reward):
    """Most rewards are drawn at random, whatever the answer is."""

    name, function, strength = "reward_noise", "coin", (0.85, 1.0)
    expects = ("reward-is-noise",)

    def options(self) -> dict[str, Any]:
        return {"onset": self.dose.onset, "share": self.dose.strength}


class NoisyJudge(_Reward):
    """A judge's scores waver by several times what tells a right answer from a wrong one."""

    name, function, strength = "reward_noisy_judge", "wavering", (2.0, 4.0)
    expects, onset = ("reward-is-noise",), FROM_START
    body = Body("sort", steps=24, changes=FEW_PROMPTS)

    def options(self) -> dict[str, Any]:
        return {"onset": self.dose.onset, "sigma": self.dose.strength}


class RewardsMisordered(_Reward):
    """A group's rewards come back in the order in which they were computed, not in its own."""

    name, function = "reward_misordered", "misordered"
    expects, onset = ("reward-is-noise",), (6, 10)
    body = Body("sort", steps=24, changes=FEW_PROMPTS)


class LabelsAtRandom(Injector):
    """Labels of pairs are flipped at random: nobody knows which answer is the better one."""

    name, family, onset = "preference_labels_random", Family.LEARNING, FROM_START
    expects, strength = ("preference-labels-noise",), (0.45, 0.55)
    body = Body("sort", "dpo", steps=40)

    def prepare(self, raw: Raw, folder: Path) -> None:
        rng = random.Random(self.dose.seed)
        for name in ("train", "eval"):
            rows = bodies.read_rows(folder / f"{name}.jsonl")
            for row in rows:
                if rng.random() < self.dose.strength:
                    row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
            bodies.write_rows(folder / f"{name}.jsonl", rows)


class ReferenceFollows(Injector):
    """The reference is the policy itself: it moves along, and the KL penalty holds nothing."""

    name, family = "reference_follows_policy", Family.POLICY
    expects, onset = ("reference-follows-policy",), FROM_START
    body = Body("sort", steps=16, changes=FEW_PROMPTS | {"algorithm.kl": {"coefficient": 0.01}})

    def before_update(self, step: int, parts: Any, rollouts: Any = None) -> None:
        roles = parts.trainer.roles
        policy, reference = (roles[role].model for role in (Role.POLICY, Role.REFERENCE))
        with torch.no_grad():
            for own, moved in zip(reference.parameters(), policy.parameters(), strict=True):
                own.copy_(moved)


class LayerNotInOptimizer(Injector):
    """The optimizer was made before a layer was added: it never updates that one."""

    name, family = "layer_not_in_optimizer", Family.LEARNING
    expects = ("trained-weights-unmoved",)
    body, onset = Body("sort", steps=12, changes=FEW_PROMPTS), FROM_START

    def started(self, parts: Any, session: Session) -> None:
        gradients = parts.trainer.roles[Role.POLICY].training.optimizer.gradients
        present = gradients.present

        def known() -> dict[str, Any]:
            return {name: grad for name, grad in present().items() if ".layers.1." not in name}

        gradients.present = known


FAULTS: tuple[type[Injector], ...] = (
    FormatOnly,
    NoiseAsReward,
    NoisyJudge,
    RewardsMisordered,
    LabelsAtRandom,
    ReferenceFollows,
    LayerNotInOptimizer,
)
