"""What a fault is: the run that it befalls, when and how hard it strikes, and who should notice.

An injector makes its run ill in one of two ways, or both: `prepare` alters the recipe and the files
before the run begins; the hooks of `run/wiring/hooks.py` lay hands on the living run. It never
touches what the run writes down.
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
    """The least that health.heal must allow for a remedy that can mend it."""

    NONE = "none"
    SAFE = "safe"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Dose:
    """Drawn from the seed: the first ill step, and how hard it strikes."""

    seed: int
    onset: int
    strength: float


class Injector(Hooks):
    """One fault. A subclass is a fault; its docstring says what goes wrong.

    `expects` names the illness in the vocabulary of health; any of them is a right answer.
    """

    name: ClassVar[str]
    family: ClassVar[Family]
    expects: ClassVar[tuple[str, ...]]
    body: ClassVar[Body] = SORT
    onset: ClassVar[tuple[int, int]] = (10, 18)
    # Bounds of the strength, drawn evenly on a logarithmic scale.
    strength: ClassVar[tuple[float, float]] = (1.0, 1.0)
    cure: ClassVar[Cure] = Cure.NONE
    # The metric by which a cure is judged, besides the finding: it comes back to this share of what
    # it was before the onset.
    vital: ClassVar[str] = ""
    vital_share: ClassVar[float] = 0.7
    # The fault itself goes on and its finding with it; cured is a run that lives with it.
    stays: ClassVar[bool] = False
    # The remedy is at work in the ill run, too: the vital metric gets better from its beginning.
    learns: ClassVar[bool] = False
    # The run is meant to die, or to be ended by its deadline.
    is_fatal: ClassVar[bool] = False
    # Times that `train` is called on the run directory.
    num_calls: ClassVar[int] = 1
    deadline_s: ClassVar[float] = 150.0

    def __init__(self, dose: Dose) -> None:
        self.dose = dose
        self._has_struck = False

    @classmethod
    def dosed(cls, seed: int) -> Dose:
        rng = random.Random(f"{cls.name}/{seed}")
        low, high = map(math.log, cls.strength)
        return Dose(seed, rng.randint(*cls.onset), math.exp(rng.uniform(low, high)))

    @classmethod
    def vital_is_loss(cls) -> bool:
        return cls.vital.endswith("loss")

    def prepare(self, raw: Raw, folder: Path) -> None:
        """Alter the recipe, or the files that it names."""

    def between_calls(self, run_dir: Path) -> None:
        """Before `train` is called on the run directory again (num_calls)."""

    def is_ill(self, step: int) -> bool:
        """For a fault that lasts."""
        return step >= self.dose.onset

    def strikes(self, step: int) -> bool:
        """For a fault that happens once, also in a run that goes back and comes by again."""
        now = step >= self.dose.onset and not self._has_struck
        self._has_struck = self._has_struck or now
        return now
