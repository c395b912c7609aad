"""Settings of the training of reward models: a scalar head on the model, and one of two losses."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from homeostat.config.base import RowAlgorithm, Settings, key
from homeostat.config.kind import RunKind
from homeostat.config.preference import AnyPreference


class BradleyTerryLoss(Settings):
    """Pairs: the chosen completion is to have the higher score (preference sources)."""

    type: Literal["bradley_terry"] = "bradley_terry"
    centre: float = key(
        0.0,
        ge=0,
        help="Weight of the squared sum of a pair's two scores, which keeps scores near 0; 0.01 is "
        "usual. Without it only differences of scores mean anything.",
    )


class PointwiseLoss(Settings):
    """Single completions with a score each (scored sources)."""

    type: Literal["pointwise"]
    error: Literal["mse", "bce"] = key(
        "mse",
        help="mse: squared difference of the model's score and the given one. bce: cross-entropy "
        "of its sigmoid and the given score, which lies between 0 and 1.",
    )


AnyRewardLoss = Annotated[BradleyTerryLoss | PointwiseLoss, Field(discriminator="type")]


class RewardModelConfig(RowAlgorithm):
    """Train a reward model. It is saved as transformers' sequence classifier with one output."""

    kind: ClassVar[RunKind] = RunKind.REWARD_MODEL
    lr: ClassVar[float] = 1e-5

    type: Literal["reward_model"]
    loss: AnyRewardLoss = key(
        BradleyTerryLoss(), help="What the scores are trained towards: pairs, or given scores."
    )

    @property
    def rows_per_example(self) -> int:
        """Return 2 for a pair of completions, else 1."""
        return 2 if isinstance(self.loss, BradleyTerryLoss) else 1


# Algorithms whose rows have labels: which completion is better, or how good it is.
AnyLabelledAlgorithm = AnyPreference | RewardModelConfig
