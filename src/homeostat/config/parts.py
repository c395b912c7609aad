"""The settings that each part of the library is given: a few sections of a recipe, not all of it.

A part that reads one or two sections takes these themselves. One that reads more takes one of the
bundles below, which names what the sections are for. `RunConfig` makes each bundle in one place
(`config.for_inputs`, ...). Their fields have the names that they have there.
"""

from __future__ import annotations

from dataclasses import dataclass

from homeostat.config.data import DataConfig
from homeostat.config.ebft import EbftConfig
from homeostat.config.observe import EvalConfig
from homeostat.config.rollout import RolloutConfig
from homeostat.config.trainer import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSettings:
    """The settings that decide which rows or prompts a run uses, and how many in a step."""

    seed: int
    data: DataConfig
    eval: EvalConfig
    rollout: RolloutConfig
    trainer: TrainerConfig
    energy: EbftConfig | None
    rows_per_example: int
    rows_per_step: int

    @property
    def is_strided(self) -> bool:
        """Return whether the run continues raw text at regular positions."""
        return self.energy is not None and self.energy.is_strided
