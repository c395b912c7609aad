"""Faults of a run that is stopped and resumed: what was learned is there, or only a part of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from homeostat.clinic.injector import Dose, Injector
from homeostat.clinic.recipes import FEW_PROMPTS, Body
from homeostat.health.finding import Family
from homeostat.run.session.session import Session
from homeostat.types import Role

SAVED = Body("sort", "sft", steps=44, changes={"checkpoint.interval_steps": 5})
SAVED_RL = Body("sort", steps=24, changes=FEW_PROMPTS | {"checkpoint.interval_steps": 5})


class _Resumed(Injector):
    """The run is stopped at the onset and resumed, and something was not restored."""

    family, num_calls = Family.CHECKPOINT, 2
    body, onset = SAVED, (14, 24)
    deadline_s = 300.0

    def __init__(self, dose: Dose) -> None:
        super().__init__(dose)
        self.is_resumed = False

    def started(self, parts: Any, session: Session) -> None:
        training = parts.trainer.roles[Role.POLICY].training
        if self.is_resumed:
            self.lose(training.optimizer)
        else:
            self.note(training.optimizer)

    def after_step(self, step: int, parts: Any) -> None:
        if self.strikes(step):
            os.kill(os.getpid(), signal.SIGTERM)

    def between_calls(self, run_dir: Path) -> None:
        self.is_resumed = True

    def note(self, optimizer: Any) -> None:
        """Remember what is needed of the first call."""

    def lose(self, optimizer: Any) -> None:
        raise NotImplementedError


class OptimizerLost(_Resumed):
    """The optimizer starts empty: its moments and its count of updates are 0."""

    name, expects = "resumed_without_optimizer", ("resumed-without-optimizer-state",)

    def lose(self, optimizer: Any) -> None:
        for slot in optimizer.slots.values():
            for tensor in slot.state.values():
                tensor.zero_()


class OptimizerLostInRl(OptimizerLost):
    """The optimizer of a policy starts empty in a resumed run."""

    name, body, onset = "resumed_without_optimizer_rl", SAVED_RL, (12, 16)


class WeightsLost(_Resumed):
    """The resumed run starts from the weights of step 0, and counts steps as if it did not."""

    name, expects = "resumed_without_weights", ("resumed-weights-lost",)

    def note(self, optimizer: Any) -> None:
        self.first: dict[str, Tensor] = {
            name: param.detach().clone() for name, param in optimizer.params.items()
        }

    def lose(self, optimizer: Any) -> None:
        with torch.no_grad():
            for name, param in optimizer.params.items():
                param.copy_(self.first[name])


FAULTS: tuple[type[Injector], ...] = (OptimizerLost, OptimizerLostInRl, WeightsLost)
