"""From a micro-batch to its log-probs and its share of the update's loss, on any backend.

    rows laid end to end -> hidden states -> log-probs of the tokens that are trained (and only
    those: the LM head is never run for the others) -> the terms of the loss

The loss is found by its name (`algorithms/losses.py`), and gets the columns that its entry names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from homeostat.algorithms.losses import EntropyNeed, LossInputs, loss_of, require_columns
from homeostat.algorithms.terms import LossTerms
from homeostat.columns import dense
from homeostat.config.trainer import TrainerConfig
from homeostat.models.decoder import Decoder
from homeostat.models.lora import lora_modules
from homeostat.ops.attention import PackedLayout
from homeostat.ops.dropout import dropout_keys
from homeostat.ops.logprobs import token_logprobs, token_logprobs_and_entropy
from homeostat.ops.sharing import SharedPrompts
from homeostat.train.roles import Model
from homeostat.train.runtime import Runtime
from homeostat.types import LossSpec, TrainBatch


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of the M trained tokens of a batch: log-prob and entropy of the distribution it is under.

    `index_M` is the token's place in the batch, `row_of_M` its row.
    """

    logp_M: Tensor
    entropy_M: Tensor | None
    index_M: Tensor
    row_of_M: Tensor


@dataclass(frozen=True, slots=True)
class Forward:
    """How this run computes a micro-batch. `has_dropout`: the policy's adapter drops at random."""

    config: TrainerConfig
    runtime: Runtime
    seed: int
    has_dropout: bool

    @classmethod
    def of(cls, policy: Model, config: TrainerConfig, *, runtime: Runtime, seed: int) -> Forward:
        has_dropout = any(module.rate > 0 for _, module in lora_modules(policy))
        return cls(config, runtime, seed, has_dropout)

    def scores(
        self,
        model: Model,
        batch: TrainBatch,
        *,
        temperature: float,
        entropy: EntropyNeed = EntropyNeed.NONE,
        dropout_step: int | None = None,
    ) -> TokenScores:
        tokens_N = self._send(batch.tokens_N)
        positions_N = self._send(batch.positions_N)
        index_M, row_of_M = predicted_positions(batch)
        layout = PackedLayout.of(batch.lengths_B.tolist(), device=self.runtime.device)
        keys_N = self._dropout_keys(batch, positions_N, dropout_step)
        sharing = self._sharing(model, batch) if keys_N is None else None
        shared = {} if sharing is None else {"sharing": sharing}
        hidden_ND = model.hidden(tokens_N, positions_N, layout, dropout_keys_N=keys_N, **shared)
        index_M = self._send(index_M)
        inputs = (hidden_ND[index_M - 1], model.output_weight(), tokens_N[index_M])
        how = {
            "temperature": temperature,
            "chunk_bytes": self.config.logits_bytes(self.runtime.device.type),
            "numerics": model.numerics,
        }
        if entropy is EntropyNeed.NONE:
            logp_M, entropy_M = token_logprobs(*inputs, **how), None
        else:
            with_grad = entropy is EntropyNeed.GRAD
            logp_M, entropy_M = token_logprobs_and_entropy(*inputs, **how, entropy_grad=with_grad)
        return TokenScores(logp_M, entropy_M, index_M, self._send(row_of_M))

    def loss(
        self, model: Model, batch: TrainBatch, spec: LossSpec, *, step: int
    ) -> tuple[TokenScores, LossTerms]:
        """What the batch adds to the loss of update `step`, which keys dropout.

        Raises LossInputError, before anything is computed, where a column is missing.
        """
        require_columns(spec, batch.columns)
        loss = loss_of(spec)
        scores = self.scores(
            model,
            batch,
            temperature=float(spec.params.get("temperature", 1.0)),
            entropy=loss.entropy(spec),
            dropout_step=step,
        )
        read = {name: dense(v) for name, v in batch.columns.items() if name in loss.columns}
        inputs = LossInputs(
            logp_M=scores.logp_M,
            entropy_M=scores.entropy_M,
            weights_M=self._send(batch.weights_N)[scores.index_M],
            columns_M={name: self._send(v)[scores.index_M] for name, v in read.items()},
            row_of_M=scores.row_of_M,
            num_rows=batch.num_rows,
        )
        return scores, loss.terms(inputs, spec)

    def _sharing(self, model: Model, batch: TrainBatch) -> SharedPrompts | None:
        if not self.config.share_prompts or not isinstance(model, Decoder) or batch.num_rows < 2:
            return None
        device = self.runtime.device
        lengths_B = prompt_lengths(batch)
        return SharedPrompts.find(batch.tokens_N, batch.lengths_B, lengths_B, device=device)

    def _dropout_keys(
        self, batch: TrainBatch, positions_N: Tensor, step: int | None
    ) -> Tensor | None:
        if step is None or not self.has_dropout:
            return None
        row_ids_N = self._send(np.repeat(batch.row_ids_B, batch.lengths_B))
        return dropout_keys(row_ids_N, positions_N, seed=self.seed, step=step)

    def _send(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.runtime.pin_memory:
            tensor = tensor.pin_memory()
        return tensor.to(self.runtime.device, non_blocking=self.runtime.pin_memory)


def predicted_positions(batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the trained tokens, and the row each belongs to."""
    index_M = np.flatnonzero(batch.weights_N)
    row_of_N = np.repeat(np.arange(batch.num_rows), batch.lengths_B)
    return index_M, row_of_N[index_M]


def prompt_lengths(batch: TrainBatch) -> np.ndarray:
    """Per row, the tokens before the first trained one."""
    starts_B = np.cumsum(batch.lengths_B) - batch.lengths_B
    trained_N = np.flatnonzero(batch.weights_N)
    first = np.searchsorted(trained_N, starts_B)
    ends_B = np.append(trained_N, batch.num_tokens)[first]
    return np.minimum(ends_B - starts_B, batch.lengths_B)
