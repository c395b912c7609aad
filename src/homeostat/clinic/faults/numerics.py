"""Faults of the numbers: weights and rows that are not finite, updates lost to rounding."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from homeostat.clinic import bodies
from homeostat.clinic.around_step import around_step
from homeostat.clinic.injector import FROM_START, SORT_SFT, Cure, Injector
from homeostat.clinic.recipes import Raw
from homeostat.health.finding import Family
from homeostat.run.session.session import Session
from homeostat.types import Role

NONFINITE = ("nan-update-poisoned-weights", "nan-loss")


class NanWeight(Injector):
    """One weight of the policy becomes NaN."""

    name, family, expects = "nan_weight", Family.NUMERICS, NONFINITE
    is_fatal = True
    cure, vital = Cure.ALL, "reward"

    def after_update(self, step: int, parts: Any) -> None:
        if self.strikes(step):
            named = sorted(parts.trainer.roles[Role.POLICY].training.optimizer.params.items())
            _, param = random.Random(self.dose.seed).choice(named)
            param.data.view(-1)[0] = float("nan")


class NanWeightInSft(NanWeight):
    """One weight becomes NaN in SFT, where no engine would notice."""

    name, body = "nan_weight_sft", SORT_SFT
    vital = "train/loss"


class InfiniteRow(Injector):
    """A symbol of a few rows overflows in the embedding: their loss is not finite."""

    name, family = "infinite_row", Family.NUMERICS
    expects = ("nonfinite-isolated", "bad-batch", "steps-skipped", "nan-loss")
    body, onset, strength = SORT_SFT, FROM_START, (10.0, 25.0)
    # The trainer skips such steps whatever health.heal says.
    cure, vital, stays, learns = Cure.SAFE, "train/loss", True, True

    def prepare(self, raw: Raw, folder: Path) -> None:
        file = folder / "train.jsonl"
        rows = bodies.read_rows(file)
        for row in random.Random(self.dose.seed).sample(rows, round(self.dose.strength)):
            row["prompt"] = "h" + row["prompt"]
        bodies.write_rows(file, rows)

    def started(self, parts: Any, session: Session) -> None:
        def overflow(module: torch.nn.Module, args: Any, hidden_ND: torch.Tensor) -> torch.Tensor:
            is_bad_N = args[0] == bodies.SYMBOLS.index("h")
            return hidden_ND.masked_fill(is_bad_N[:, None], float("inf"))

        parts.trainer.roles[Role.POLICY].model.causal_lm.model.embed_tokens.register_forward_hook(
            overflow
        )


class RoundedAway(Injector):
    """Weights are kept in bf16 without fp32 masters: updates are below its resolution."""

    name, family = "bf16_updates", Family.PRECISION
    expects = ("update-below-resolution", "trained-weights-unmoved")
    body, onset, strength = SORT_SFT, FROM_START, (1e-6, 5e-6)

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["trainer"]["lr"] = self.dose.strength

    def started(self, parts: Any, session: Session) -> None:
        params = list(parts.trainer.roles[Role.POLICY].training.optimizer.params.values())

        def round_all() -> None:
            for param in params:
                param.data.copy_(param.data.to(torch.bfloat16))

        round_all()
        around_step(parts, after=round_all)


FAULTS: tuple[type[Injector], ...] = (NanWeight, NanWeightInSft, InfiniteRow, RoundedAway)
