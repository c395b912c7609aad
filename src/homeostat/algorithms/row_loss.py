"""The loss of a run that trains on given rows: what an update over some rows minimises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from homeostat.algorithms.preference import preference_spec
from homeostat.algorithms.reward_model import reward_model_spec
from homeostat.algorithms.sft import loss_spec
from homeostat.config.kind import RunKind
from homeostat.config.run import RunConfig
from homeostat.types import LossSpec, TokenRow


@dataclass(frozen=True, slots=True)
class RowLoss:
    """`spec` returns the loss of an update over rows; so many of them are one example."""

    spec: Callable[[Sequence[TokenRow]], LossSpec]
    rows_per_example: int = 1


def row_loss(config: RunConfig) -> RowLoss:
    """Return the loss of a run that samples nothing."""
    if config.kind is RunKind.PREFERENCE:
        spec = partial(preference_spec, config.preferring, config.preference)
        return RowLoss(spec, config.rows_per_example)
    if config.kind is RunKind.REWARD_MODEL:
        spec = partial(reward_model_spec, config.rewarding, has_margin=_has_margin(config))
        return RowLoss(spec, config.rows_per_example)
    return RowLoss(partial(loss_spec, config.sft))


def _has_margin(config: RunConfig) -> bool:
    return any(getattr(source, "margin_column", None) for source in config.data.train)
