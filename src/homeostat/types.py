"""The values that modules exchange. This module is torch-free: arrays are numpy.

These suffixes are used everywhere: `_N` packed tokens, `_B` rows (documents), `_T` tokens of one
row, `_G` samples of a group, `_M` predicted tokens, `_V` vocabulary, `_D` model dim, `_L` layer.

The mapping from tokens to logits is defined once, here: `weights_N[n]` is the weight of
*predicting* token n, which is done by the hidden state at n - 1. Nothing predicts the first token
of a row, so its weight is always 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from homeostat.arrays import BoolArray, FloatArray, IntArray
from homeostat.columns import COLUMNS, ColumnArray, Columns, check_columns, concatenate, joined
from homeostat.columns import split as split_column
from homeostat.expert_load import ExpertLoad, RouterLoss

# The id of the policy in a run that trains one.
POLICY_ID = "policy"


class Role(StrEnum):
    """The model that a Trainer call addresses."""

    POLICY = "policy"
    REFERENCE = "reference"
    CRITIC = "critic"
    # Computes the features by which energy-based fine-tuning compares texts.
    FEATURES = "features"


class StopReason(StrEnum):
    """Why a completion ended. Metrics, journal and docs use the same words."""

    STOP = "stop"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    DEADLINE = "deadline"
    ABORTED = "aborted"

    @property
    def is_cut(self) -> bool:
        """Return whether the completion was truncated, rather than ended by the policy itself."""
        return self in (StopReason.LENGTH, StopReason.DEADLINE, StopReason.ABORTED)


class Author(StrEnum):
    """The author of a segment's tokens. Only the engine's tokens are trained."""

    ENGINE = "engine"
    TOOL = "tool"
    USER = "user"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of a completion that one author wrote under one version of the policy.

    `engine_logp_T` is under the full distribution at the sampling temperature. If top-k, top-p or
    min-p truncated the distribution, `sampled_logp_T` is under the truncated one; None means that
    nothing was truncated. The column `kept_ids` holds what the truncation left of each token's
    distribution, so that the trainer can compute over the same. Tokens that no engine sampled
    have NaN. `columns` holds what else the engine recorded of each token, as `homeostat.columns`
    declares it.
    """

    tokens_T: IntArray
    engine_logp_T: FloatArray
    policy_version: int
    policy_id: str = POLICY_ID
    author: Author = Author.ENGINE
    sampled_logp_T: FloatArray | None = None
    columns: Columns = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_columns(self.columns, num_tokens=len(self.tokens_T), whose="segment")


@dataclass(frozen=True)
class Completion:
    """The result of a request: its segments, and why it ended.

    `prompt_columns` holds what the engine recorded of the prompt's tokens while it read them.
    """

    request_id: str
    segments: tuple[Segment, ...]
    stop_reason: StopReason
    prompt_columns: Columns = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.prompt_columns:
            assert COLUMNS[name].on_prompts, f"{name} is not declared for prompts"

    @cached_property
    def tokens_T(self) -> IntArray:
        parts = [segment.tokens_T for segment in self.segments]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    @cached_property
    def engine_logp_T(self) -> FloatArray:
        parts = [segment.engine_logp_T for segment in self.segments]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)

    @cached_property
    def sampled_logp_T(self) -> FloatArray:
        """Log-probs under the distributions that the tokens were drawn from, truncated or not."""
        parts = [
            segment.engine_logp_T if segment.sampled_logp_T is None else segment.sampled_logp_T
            for segment in self.segments
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)

    @cached_property
    def columns(self) -> dict[str, ColumnArray]:
        """The columns of all segments end to end; tokens of a segment without one have no value."""
        lengths = [len(segment.tokens_T) for segment in self.segments]
        return joined([segment.columns for segment in self.segments], lengths=lengths)

    def __len__(self) -> int:
        """Number of tokens, whoever wrote them; `num_policy_tokens` counts the policy's own."""
        return sum(len(segment.tokens_T) for segment in self.segments)

    @cached_property
    def by_policy_T(self) -> BoolArray:
        """True for the tokens that the policy sampled, False for a tool's or a user's."""
        sampled = [segment.author is Author.ENGINE for segment in self.segments]
        return np.repeat(np.array(sampled, dtype=bool), self._segment_lengths)

    @property
    def policy_tokens_T(self) -> IntArray:
        """The tokens that the policy sampled: only these are decoded, rewarded and trained."""
        return self.tokens_T[self.by_policy_T]

    @property
    def num_policy_tokens(self) -> int:
        """The completion's length, as metrics, penalties and rewards count it."""
        return int(np.count_nonzero(self.by_policy_T))

    @property
    def policy_versions_T(self) -> IntArray:
        """The policy version that sampled each of `policy_tokens_T`."""
        versions = np.array([segment.policy_version for segment in self.segments], dtype=np.int64)
        return np.repeat(versions, self._segment_lengths)[self.by_policy_T]

    @property
    def _segment_lengths(self) -> list[int]:
        return [len(segment.tokens_T) for segment in self.segments]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row to answer. `prompt` is its text or its messages; `columns` holds the other columns.

    `reference_T` is what the policy should have answered, in tokens that follow those of the
    prompt; None if the run compares samples with nothing.
    """

    prompt_id: int
    tokens_T: IntArray
    prompt: str | list[dict[str, Any]]
    columns: Mapping[str, Any]
    reference_T: IntArray | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion with its rewards.

    `rewards` holds the value of every function. None means that the function does not apply to the
    sample (TRL's convention) or that it failed; `failed` names those that failed. `reward` is the
    weighted sum that is trained on. It is None, and the sample is not trained, if a function with a
    weight failed or if no function applies.
    """

    completion: Completion
    text: str
    rewards: Mapping[str, float | None]
    reward: float | None
    # Values that reward functions passed to log_extra: shown to people, never trained on.
    extras: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All samples of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One training example after tokenisation. `row_id` is its number in the data set or step.

    `columns` holds further values per token, as `homeostat.columns` declares them.
    """

    row_id: int
    tokens_T: IntArray
    weights_T: FloatArray
    columns: Columns = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.weights_T.shape == self.tokens_T.shape, (
            f"row {self.row_id}: {self.tokens_T.shape} tokens, {self.weights_T.shape} weights"
        )
        check_columns(self.columns, num_tokens=len(self), whose=f"row {self.row_id}")

    def __len__(self) -> int:
        return int(self.tokens_T.shape[0])


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One micro-batch: rows concatenated without padding.

    `lengths_B` gives the lengths of the rows in order; `positions_N` restarts at 0 for each row.
    All rows have the same columns.
    """

    tokens_N: IntArray
    positions_N: IntArray
    weights_N: FloatArray
    lengths_B: IntArray
    row_ids_B: IntArray
    columns: Columns = field(default_factory=dict)

    @classmethod
    def of(cls, rows: list[TokenRow]) -> TrainBatch:
        """Concatenate rows into a micro-batch."""
        assert rows, "a batch needs at least one row"
        for row in rows:
            odd = row.columns.keys() ^ rows[0].columns.keys()
            assert not odd, f"rows {rows[0].row_id} and {row.row_id}: only one has {sorted(odd)}"
        weights = [row.weights_T.astype(np.float32, copy=True) for row in rows]
        for weights_T in weights:
            weights_T[0] = 0.0
        return cls(
            tokens_N=np.concatenate([row.tokens_T for row in rows]).astype(np.int64, copy=False),
            positions_N=np.concatenate([np.arange(len(row), dtype=np.int64) for row in rows]),
            weights_N=np.concatenate(weights),
            lengths_B=np.array([len(row) for row in rows], dtype=np.int64),
            row_ids_B=np.array([row.row_id for row in rows], dtype=np.int64),
            columns={
                name: concatenate([row.columns[name] for row in rows]) for name in rows[0].columns
            },
        )

    def rows(self) -> list[TokenRow]:
        """Split the micro-batch into the rows of which it was made."""
        cuts = np.cumsum(self.lengths_B)[:-1]
        tokens, weights = np.split(self.tokens_N, cuts), np.split(self.weights_N, cuts)
        columns = {name: split_column(v, self.lengths_B) for name, v in self.columns.items()}
        return [
            TokenRow(
                int(row_id),
                tokens[index],
                weights[index],
                {name: parts[index] for name, parts in columns.items()},
            )
            for index, row_id in enumerate(self.row_ids_B)
        ]

    @property
    def num_tokens(self) -> int:
        return int(self.tokens_N.shape[0])

    @property
    def num_rows(self) -> int:
        return int(self.lengths_B.shape[0])


@dataclass(frozen=True, slots=True)
class Outputs:
    """A request for outputs of a forward pass.

    `logp` and `entropy` are of the trained tokens, under the distribution at `temperature`;
    `value` needs a model with a value head, which gives no log-probs. `hidden` names layers as
    transformers numbers them (0 is the embedding, the last one is after the final norm). Hidden
    states never leave the rank that computed them: `reducer` names what is made of them there
    (train/reducers.py). `load` is the load of the model's experts.
    """

    logp: bool = False
    entropy: bool = False
    value: bool = False
    hidden: tuple[int, ...] = ()
    reducer: str = ""
    temperature: float = 1.0
    load: bool = False

    def __post_init__(self) -> None:
        assert bool(self.hidden) == bool(self.reducer), "hidden states go with their reducer"
        wanted = (self.logp, self.entropy, self.value, self.hidden, self.load)
        assert any(wanted), "nothing is asked for"


@dataclass(frozen=True, slots=True)
class Computed:
    """The outputs of a forward pass over one batch; None or no entry for what was not asked for.

    `value_M` is the value of the state in which each trained token was chosen, that is of the text
    before it; `value_B` that of each whole row, at its last token. `hidden` maps a layer to what
    the reducer made of its states.
    """

    logp_M: FloatArray | None = None
    entropy_M: FloatArray | None = None
    value_M: FloatArray | None = None
    value_B: FloatArray | None = None
    hidden: Mapping[int, FloatArray] = field(default_factory=dict)
    load_LE: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss by name and parameters, serialisable.

    `denominator` belongs to the whole update and is known before it is split into micro-batches, so
    the gradient does not depend on the split. `router` is the part of a model's routers.
    """

    name: str
    denominator: float
    params: Mapping[str, float | str] = field(default_factory=dict)
    router: RouterLoss | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer update of one role: its rows, split into micro-batches, and its loss."""

    step: int
    epoch: int
    micro_batches: tuple[TrainBatch, ...]
    loss: LossSpec
    role: Role = Role.POLICY

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.micro_batches)

    @property
    def num_rows(self) -> int:
        return sum(batch.num_rows for batch in self.micro_batches)


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The result of an update of a role, the same on every rank.

    `applied` is False if the loss or gradient was not finite; weights and optimizer are then
    exactly as before the step. `stats` holds the values that the loss measured. `row_logp` holds,
    for each row, the log-probs of its trained tokens under the weights before the update; their
    values, if the model has a value head. `probes` holds the measurements of this update by metric
    name, if it was measured; `unmeasured` says why a measurement is missing. `load` is None if the
    model has no experts.
    """

    step: int
    applied: bool
    loss: float
    grad_norm: float
    learning_rate: float
    num_micro_batches: int
    row_ids_B: IntArray
    row_losses_B: FloatArray
    stats: Mapping[str, float] = field(default_factory=dict)
    row_logp: tuple[FloatArray, ...] = ()
    probes: Mapping[str, float] = field(default_factory=dict)
    unmeasured: str = ""
    role: Role = Role.POLICY
    load: ExpertLoad | None = None
