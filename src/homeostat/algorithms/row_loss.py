"""The loss of a run that trains on given rows: what an update over some rows minimises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from homeostat.algorithms.preference import preference_spec
from homeostat.algorithms.reward_model import reward_model_spec
from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import AnyAlgorithm, SftConfig
from homeostat.config.data import DataConfig
from homeostat.config.preference import PreferenceAlgorithm, PreferenceConfig
from homeostat.config.reward_model import RewardModelConfig
from homeostat.types import LossSpec, TokenRow


@dataclass(frozen=True, slots=True)
class RowLoss:
    """`spec` returns the loss of an update over rows; so many of them are one example."""

    spec: Callable[[Sequence[TokenRow]], LossSpec]
    rows_per_example: int = 1


def row_loss(algorithm: AnyAlgorithm, *, preference: PreferenceConfig, data: DataConfig) -> RowLoss:
    """Return the loss of a run that samples nothing."""
    if isinstance(algorithm, PreferenceAlgorithm):
        spec = partial(preference_spec, algorithm, preference)
        return RowLoss(spec, algorithm.rows_per_example)
    if isinstance(algorithm, RewardModelConfig):
        spec = partial(reward_model_spec, algorithm, has_margin=data.has_margin)
        return RowLoss(spec, algorithm.rows_per_example)
    assert isinstance(algorithm, SftConfig), algorithm.type
    return RowLoss(partial(loss_spec, algorithm))
