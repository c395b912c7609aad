"""Settings of the training of reward models: a scalar head on the model, and one of two losses."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from homeostat.config.base import RowAlgorithm, Settings, key
from homeostat.config.kind import RunKind
from homeostat.config.preference import AnyPreference


class BradleyTerryLoss(Settings):
    """Pairs: train the chosen completion to score higher than the rejected one (preference
    sources).
    """

    type: Literal["bradley_terry"] = "bradley_terry"
    centre: float = key(
        0.0,
        ge=0,
        help="Weight of a penalty that keeps scores near 0: the squared sum of a pair's two "
        "scores. A usual value is 0.01. Without the penalty only differences between scores are "
        "meaningful.",
    )


class PointwiseLoss(Settings):
    """Single completions, each with a given score (scored sources)."""

    type: Literal["pointwise"]
    error: Literal["mse", "bce"] = key(
        "mse",
        help="mse: squared difference between the model's score and the given score. bce: binary "
        "cross-entropy between the sigmoid of the model's score and the given score, which must "
        "lie between 0 and 1.",
    )


AnyRewardLoss = Annotated[BradleyTerryLoss | PointwiseLoss, Field(discriminator="type")]


class RewardModelConfig(RowAlgorithm):
    """Train a reward model. It is saved as transformers' sequence classifier with one output."""

    kind: ClassVar[RunKind] = RunKind.REWARD_MODEL
    lr: ClassVar[float] = 1e-5

    type: Literal["reward_model"]
    loss: AnyRewardLoss = key(
        BradleyTerryLoss(),
        help="The training target. bradley_terry: pairs of a better and a "
        "worse completion. pointwise: a given score for each completion.",
    )

    @property
    def rows_per_example(self) -> int:
        """Return 2 for a pair of completions, else 1."""
        return 2 if isinstance(self.loss, BradleyTerryLoss) else 1


# Algorithms whose rows have labels: which completion is better, or how good it is.
AnyLabelledAlgorithm = AnyPreference | RewardModelConfig
