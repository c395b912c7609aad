"""The Trainer on one device.

One micro-batch: rows laid end to end -> hidden states -> log-probs of the tokens that are trained
(and only those: the LM head is never run for the others) -> the update's loss -> backward. One
device-to-host copy per update, at its end.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from homeostat.algorithms import sft
from homeostat.config.trainer import TrainerConfig
from homeostat.models.build import LoadedModel
from homeostat.models.lora import lora_modules, merged_state
from homeostat.ops.attention import PackedLayout
from homeostat.ops.dropout import dropout_keys
from homeostat.ops.logprobs import token_logprobs
from homeostat.train.checkpoint import copy_tensors
from homeostat.train.frozen import frozen_checksums, require_same_frozen
from homeostat.train.optim import MasterAdamW
from homeostat.train.runtime import Runtime
from homeostat.train.trainer import MemoryReport, RowScores
from homeostat.types import LossSpec, Role, TrainBatch, UpdateReport


class LocalTrainer:
    """Trains one model in this process. Implements `train.trainer.Trainer`."""

    def __init__(
        self, loaded: LoadedModel, config: TrainerConfig, *, runtime: Runtime, seed: int
    ) -> None:
        self.loaded = loaded
        self.model = loaded.module
        self.config = config
        self.runtime = runtime
        self.seed = seed
        self.optimizer = MasterAdamW(self.model.causal_lm.named_parameters(), config.optimizer)
        self.has_dropout = any(module.rate > 0 for _, module in lora_modules(self.model))
        self._pending: list[tuple[Tensor, RowScores, np.ndarray]] = []

    def score(self, role: Role, batch: TrainBatch) -> RowScores:
        self._own(role)
        self.model.eval()
        with torch.no_grad():
            scores = self._row_scores(batch, dropout_step=None)
        self.model.train()
        return scores

    def accumulate(self, role: Role, batch: TrainBatch, spec: LossSpec, *, step: int) -> None:
        self._own(role)
        self.model.train()
        scores = self._row_scores(batch, dropout_step=step)
        loss = sft.loss(scores.nll_B, scores.weight_B, spec)
        loss.backward()
        detached = RowScores(scores.nll_B.detach(), scores.weight_B)
        self._pending.append((loss.detach(), detached, batch.row_ids_B))

    def discard(self, role: Role) -> None:
        self._own(role)
        self._pending.clear()
        self.optimizer.zero_grad()

    def apply(self, role: Role, *, step: int, learning_rate: float) -> UpdateReport:
        self._own(role)
        assert self._pending, "apply needs at least one accumulate before it"
        loss = self.pending_loss()
        nll_B = torch.cat([scores.nll_B for _, scores, _ in self._pending])
        weight_B = torch.cat([scores.weight_B for _, scores, _ in self._pending])
        norm = self.pending_norm()
        row_losses = nll_B / weight_B.clamp_min(1e-30)
        host = torch.cat([loss[None], norm[None], row_losses]).float().cpu().numpy()
        row_ids = np.concatenate([ids for _, _, ids in self._pending])
        num_micro_batches = len(self._pending)
        loss_value, norm_value = float(host[0]), float(host[1])
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        if finite:
            self.optimizer.step(
                learning_rate=learning_rate,
                grad_norm=norm_value,
                max_grad_norm=self.config.max_grad_norm,
            )
        self.discard(role)
        interval = self.config.empty_cache_interval
        if interval and step % interval == 0:
            torch.cuda.empty_cache()
        return UpdateReport(
            step=step,
            applied=finite,
            loss=loss_value,
            grad_norm=norm_value,
            learning_rate=learning_rate,
            num_micro_batches=num_micro_batches,
            row_ids_B=row_ids,
            row_losses_B=host[2:],
        )

    def pending_loss(self) -> Tensor:
        """The loss accumulated so far, as a device scalar; 0 before the first micro-batch."""
        losses = [loss for loss, _, _ in self._pending]
        return torch.stack(losses).sum() if losses else torch.zeros(())

    def pending_norm(self) -> Tensor:
        """The norm of the gradient accumulated so far, as a device scalar."""
        return self.optimizer.grad_norm()

    def weights(self, role: Role) -> Iterator[tuple[str, Tensor]]:
        self._own(role)
        yield from merged_state(self.model)

    def state(self) -> dict[str, dict[str, Tensor]]:
        model = {name: param.detach() for name, param in self.optimizer.params.items()}
        tensors = {"model": model, "optimizer": self.optimizer.state()}
        return tensors | ({"frozen": self._frozen} if self._frozen else {})

    @torch.no_grad()
    def load_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        require_same_frozen(self._frozen, state.get("frozen", {}))
        copy_tensors(self.optimizer.params, state.get("model", {}), what="model")
        self.optimizer.load_state(state.get("optimizer", {}))

    @cached_property
    def _frozen(self) -> dict[str, Tensor]:
        """Of the weights under an adapter, which no checkpoint holds: their bytes, summed up."""
        return frozen_checksums(self.model.causal_lm)

    def memory_report(self) -> MemoryReport:
        if self.runtime.device.type == "cuda":
            return MemoryReport(
                max_alloc=torch.cuda.max_memory_allocated(),
                max_reserved=torch.cuda.max_memory_reserved(),
            )
        # ru_maxrss is in KiB on Linux: the highest resident size of this process.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return MemoryReport(max_alloc=peak, max_reserved=peak)

    def _own(self, role: Role) -> None:
        assert role is Role.POLICY, f"no model has the role {role}"

    def _row_scores(self, batch: TrainBatch, *, dropout_step: int | None) -> RowScores:
        tokens_N = self._send(batch.tokens_N)
        positions_N = self._send(batch.positions_N)
        index_M, row_of_M = predicted_positions(batch)
        layout = PackedLayout.of(batch.lengths_B.tolist(), device=self.runtime.device)
        keys_N = self._dropout_keys(batch, positions_N, dropout_step)
        hidden_ND = self.model.hidden(tokens_N, positions_N, layout, dropout_keys_N=keys_N)
        index_M = self._send(index_M)
        logp_M = token_logprobs(
            hidden_ND[index_M - 1],
            self.model.output_weight(),
            tokens_N[index_M],
            chunk_bytes=self.config.logits_chunk_bytes,
        )
        weights_M = self._send(batch.weights_N)[index_M]
        nll_B, weight_B = sft.row_sums(logp_M, weights_M, self._send(row_of_M), batch.num_rows)
        return RowScores(nll_B, weight_B)

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
