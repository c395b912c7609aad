"""The definition of a fault: its run, its onset and strength, and which findings should name it.

An injector makes its run ill in one of two ways, or both: `prepare` alters the recipe and the files
before the run begins; the hooks of `run/wiring/hooks.py` alter the running process. It never
touches what the run writes.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from homeostat.clinic.recipes import Body, Raw
from homeostat.health.finding import Family
from homeostat.run.wiring.hooks import Hooks

SORT = Body("sort", steps=40)
SORT_SFT = Body("sort", "sft", steps=40)
FROM_START = (1, 1)


class Cure(StrEnum):
    """The least that health.heal must allow for a remedy that can cure the fault."""

    NONE = "none"
    SAFE = "safe"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Dose:
    """The first ill step and the strength of the fault, drawn from the seed."""

    seed: int
    onset: int
    strength: float


class Injector(Hooks):
    """One fault. Each subclass is a fault; its docstring says what goes wrong.

    `expects` names the illness in the vocabulary of health; any of these names is a right answer.
    """

    name: ClassVar[str]
    family: ClassVar[Family]
    expects: ClassVar[tuple[str, ...]]
    body: ClassVar[Body] = SORT
    onset: ClassVar[tuple[int, int]] = (10, 18)
    # Bounds of the strength, which is drawn uniformly on a logarithmic scale.
    strength: ClassVar[tuple[float, float]] = (1.0, 1.0)
    cure: ClassVar[Cure] = Cure.NONE
    # The metric by which a cure is judged in addition to the finding: it must return to this share
    # of its value before the onset.
    vital: ClassVar[str] = ""
    vital_share: ClassVar[float] = 0.7
    # The fault itself continues, and so does its finding; cured means that the run copes with it.
    stays: ClassVar[bool] = False
    # The remedy also acts in the ill run: the vital metric must improve on its first value.
    learns: ClassVar[bool] = False
    # The run is expected to die, or to be ended by its deadline.
    is_fatal: ClassVar[bool] = False
    # Number of times that `train` is called on the run directory.
    num_calls: ClassVar[int] = 1
    # The fault makes the run resume from a step before the onset, so its finding has such a step.
    goes_back: ClassVar[bool] = False
    deadline_s: ClassVar[float] = 150.0

    def __init__(self, dose: Dose) -> None:
        self.dose = dose
        self._has_struck = False

    @classmethod
    def dosed(cls, seed: int) -> Dose:
        """Draw a dose from the seed."""
        rng = random.Random(f"{cls.name}/{seed}")
        low, high = map(math.log, cls.strength)
        return Dose(seed, rng.randint(*cls.onset), math.exp(rng.uniform(low, high)))

    @classmethod
    def vital_is_loss(cls) -> bool:
        return cls.vital.endswith("loss")

    def prepare(self, raw: Raw, folder: Path) -> None:
        """Alter the recipe, or the files that it names."""

    def between_calls(self, run_dir: Path) -> None:
        """Run before `train` is called on the run directory again (num_calls)."""

    def is_ill(self, step: int) -> bool:
        """Return whether a lasting fault is active at a step."""
        return step >= self.dose.onset

    def strikes(self, step: int) -> bool:
        """Return True once, at the onset, even in a run that goes back and passes it again."""
        now = step >= self.dose.onset and not self._has_struck
        self._has_struck = self._has_struck or now
        return now
