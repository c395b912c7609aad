"""The values that cross module borders. Torch-free: arrays here are numpy.

Suffixes, here and everywhere: `_N` packed tokens, `_B` rows (documents), `_T` tokens of one row,
`_V` vocabulary, `_D` model dim, `_L` layer.

The token-to-logit map is fixed once, here: `weights_N[n]` is the weight of *predicting* token n,
which the hidden state at n - 1 does. The first token of a row is predicted by nothing, so its
weight is always 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


class Role(StrEnum):
    """Which model a Trainer call addresses."""

    POLICY = "policy"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One training example after tokenisation. `row_id` is its number in the data set."""

    row_id: int
    tokens_T: IntArray
    weights_T: FloatArray

    def __post_init__(self) -> None:
        assert self.tokens_T.shape == self.weights_T.shape, (
            f"row {self.row_id}: {self.tokens_T.shape} tokens, {self.weights_T.shape} weights"
        )

    def __len__(self) -> int:
        return int(self.tokens_T.shape[0])


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One micro-batch: rows laid end to end, without padding.

    `lengths_B` gives the rows' lengths in order; `positions_N` restarts at 0 for each row.
    """

    tokens_N: IntArray
    positions_N: IntArray
    weights_N: FloatArray
    lengths_B: IntArray
    row_ids_B: IntArray

    @classmethod
    def of(cls, rows: list[TokenRow]) -> TrainBatch:
        assert rows, "a batch needs at least one row"
        weights = [row.weights_T.astype(np.float32, copy=True) for row in rows]
        for weights_T in weights:
            weights_T[0] = 0.0
        return cls(
            tokens_N=np.concatenate([row.tokens_T for row in rows]).astype(np.int64, copy=False),
            positions_N=np.concatenate([np.arange(len(row), dtype=np.int64) for row in rows]),
            weights_N=np.concatenate(weights),
            lengths_B=np.array([len(row) for row in rows], dtype=np.int64),
            row_ids_B=np.array([row.row_id for row in rows], dtype=np.int64),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.tokens_N.shape[0])

    @property
    def num_rows(self) -> int:
        return int(self.lengths_B.shape[0])


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss by name and parameters, serialisable.

    `denominator` belongs to the whole update and is known before it is split into micro-batches,
    so that the gradient does not depend on the split.
    """

    name: str
    denominator: float
    params: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one optimizer update does: its rows, split into micro-batches, and its loss."""

    step: int
    epoch: int
    micro_batches: tuple[TrainBatch, ...]
    loss: LossSpec

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.micro_batches)

    @property
    def num_rows(self) -> int:
        return sum(batch.num_rows for batch in self.micro_batches)


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What an update did. The same on every rank.

    `applied` is False when the loss or gradient was not finite: weights and optimizer are then
    exactly as before the step.
    """

    step: int
    applied: bool
    loss: float
    grad_norm: float
    learning_rate: float
    num_micro_batches: int
    row_ids_B: IntArray
    row_losses_B: FloatArray
