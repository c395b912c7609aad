"""The Trainer on one device.

One micro-batch: rows laid end to end -> hidden states -> log-probs of the tokens that are trained
(and only those: the LM head is never run for the others) -> the update's loss -> backward. One
device-to-host copy per update, at its end. The loss is found by its name in the catalogue; what it
needs besides log-probs are columns of the batch.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from homeostat.algorithms.terms import LossTerms
from homeostat.config.run import RunConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.models.build import LoadedModel, ModelSheet
from homeostat.models.decoder import Decoder
from homeostat.models.hf import save_hf
from homeostat.models.lora import adapters_off, lora_modules, merged_state, save_adapter
from homeostat.models.transformers_model import TransformersModel
from homeostat.ops.attention import PackedLayout
from homeostat.ops.dropout import dropout_keys
from homeostat.ops.logprobs import token_logprobs, token_logprobs_and_entropy
from homeostat.ops.sharing import SharedPrompts
from homeostat.train.checkpoint import copy_tensors, read_tensors, write_tensors
from homeostat.train.frozen import REFERENCE, checksums, require_same_frozen
from homeostat.train.losses import EntropyNeed, entropy_need, loss_terms, reduce_stats
from homeostat.train.nonfinite import find_bad_rows, trace_origin
from homeostat.train.optim import MasterAdamW
from homeostat.train.runtime import Runtime
from homeostat.train.trainer import MemoryReport, Origin
from homeostat.types import (
    FloatArray,
    LossSpec,
    Role,
    StepPlan,
    TokenRow,
    TrainBatch,
    UpdateReport,
)

if TYPE_CHECKING:
    from homeostat.sync.parcel import Packer, Parcel


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
class Accumulated:
    """What is remembered of a micro-batch until its update is applied."""

    terms: LossTerms
    logp_M: Tensor
    row_ids_B: np.ndarray
    num_trained_B: np.ndarray


@dataclass(frozen=True, slots=True)
class AdapterOff:
    """The reference is the policy without its adapter."""


Model = Decoder | TransformersModel
Reference = Model | AdapterOff


class LocalTrainer:
    """Trains one model in this process. Implements `train.trainer.Trainer`."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: TrainerConfig,
        *,
        runtime: Runtime,
        seed: int,
        reference: Reference | None = None,
        save_reference: bool = False,
    ) -> None:
        self.loaded = loaded
        self.model = loaded.module
        self.config = config
        self.runtime = runtime
        self.seed = seed
        self.reference = reference
        self.save_reference = save_reference
        self.optimizer = MasterAdamW(self.model.causal_lm.named_parameters(), config.optimizer)
        self.has_dropout = any(module.rate > 0 for _, module in lora_modules(self.model))
        self._pending: list[Accumulated] = []

    @property
    def sheet(self) -> ModelSheet:
        return self.loaded.sheet

    @property
    def num_ranks(self) -> int:
        return 1

    def score(
        self, role: Role, batches: Sequence[TrainBatch], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        with torch.no_grad(), self._acting(role) as model:
            model.eval()
            found = [self._scores(model, batch, temperature=temperature) for batch in batches]
            model.train()
        return [scores.logp_M.float().cpu().numpy() for scores in found]

    def accumulate(
        self, role: Role, batches: Sequence[TrainBatch], spec: LossSpec, *, step: int
    ) -> None:
        self._own(role)
        self.model.train()
        for batch in batches:
            self._accumulate(batch, spec, step=step)

    def _accumulate(self, batch: TrainBatch, spec: LossSpec, *, step: int) -> None:
        scores = self._scores(
            self.model,
            batch,
            temperature=float(spec.params.get("temperature", 1.0)),
            entropy=entropy_need(spec),
            dropout_step=step,
        )
        terms = self._terms(scores, batch, spec)
        terms.loss.backward()
        trained_N = batch.weights_N != 0
        starts_B = np.cumsum(batch.lengths_B) - batch.lengths_B
        self._pending.append(
            Accumulated(
                terms=replace(terms, loss=terms.loss.detach()),
                logp_M=scores.logp_M.detach(),
                row_ids_B=batch.row_ids_B,
                num_trained_B=np.add.reduceat(trained_N, starts_B, dtype=np.int64),
            )
        )

    def discard(self, role: Role) -> None:
        self._own(role)
        self._pending.clear()
        self.optimizer.zero_grad()

    def apply(self, role: Role, *, step: int, learning_rate: float) -> UpdateReport:
        self._own(role)
        assert self._pending, "apply needs at least one accumulate before it"
        done = self._pending
        stats = reduce_stats([part.terms for part in done])
        scalars = torch.stack([self.pending_loss(), self.pending_norm(), *stats.values()])
        row_losses = [part.terms.row_losses_B for part in done]
        parts = [scalars, *row_losses, *(part.logp_M for part in done)]
        # The one copy to the host of the whole update.
        host = torch.cat([part.float() for part in parts]).cpu().numpy()
        num_rows = sum(len(losses_B) for losses_B in row_losses)
        scalars_host, row_losses_B, logp_host = np.split(
            host, [len(scalars), len(scalars) + num_rows]
        )
        ends_B = np.cumsum(np.concatenate([part.num_trained_B for part in done]))
        loss_value, norm_value = scalars_host[:2].tolist()
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        report = UpdateReport(
            step=step,
            applied=finite,
            loss=loss_value,
            grad_norm=norm_value,
            learning_rate=learning_rate,
            num_micro_batches=len(done),
            row_ids_B=np.concatenate([part.row_ids_B for part in done]),
            row_losses_B=row_losses_B,
            stats=dict(zip(stats, scalars_host[2:].tolist(), strict=True)),
            row_logp=tuple(np.split(logp_host, ends_B[:-1])),
        )
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
        return report

    def pending_loss(self) -> Tensor:
        """The loss accumulated so far, as a device scalar; 0 before the first micro-batch."""
        losses = [part.terms.loss for part in self._pending]
        return torch.stack(losses).sum() if losses else torch.zeros(())

    def pending_norm(self) -> Tensor:
        """The norm of the gradient accumulated so far, as a device scalar."""
        return self.optimizer.grad_norm()

    @torch.no_grad()
    def refresh_reference(self) -> None:
        assert isinstance(self.reference, nn.Module), "only a copy can be refreshed"
        policy = dict(self.model.causal_lm.named_parameters())
        for name, param in self.reference.causal_lm.named_parameters():
            param.copy_(policy[name])

    def trace_nonfinite(self, plan: StepPlan) -> tuple[list[TokenRow], Origin]:
        rows = [row for batch in plan.micro_batches for row in batch.rows()]
        bad = find_bad_rows(self, rows, plan)
        return bad, trace_origin(self, bad, plan)

    def weights(self, role: Role) -> Iterator[tuple[str, Tensor]]:
        """All weights under canonical HF names, adapters merged in."""
        self._own(role)
        yield from merged_state(self.model)

    def parcels(self, role: Role, packer: Packer) -> Iterator[Parcel]:
        return packer.pack(self.weights(role))

    def checksums(self) -> dict[str, int]:
        sums = checksums(self.model.causal_lm)
        return {name: int(value) for name, value in sums.items()}

    def export(self, folder: Path, config: RunConfig) -> None:
        if config.lora is not None and config.lora.export == "adapter":
            save_adapter(self.model, folder, config.lora, base_path=config.model.path)
            return
        save_hf(
            self.weights(Role.POLICY),
            folder,
            source_config=self.sheet.source_config,
            generation_config=self.sheet.generation_config,
            max_shard_bytes=config.checkpoint.max_shard_bytes,
        )

    @property
    def state_bytes(self) -> int:
        return sum(t.nbytes for group in self.state().values() for t in group.values())

    def save(self, folder: Path) -> None:
        write_tensors(folder, self.state())

    def load(self, folder: Path) -> None:
        self.load_state(read_tensors(folder))

    def close(self) -> None:
        """Nothing was started."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything an exact resume needs: file stem -> tensor name -> tensor."""
        model = {name: param.detach() for name, param in self.optimizer.params.items()}
        tensors = {"model": model, "optimizer": self.optimizer.state()}
        if self.save_reference:
            tensors["reference"] = self._reference_params()
        return tensors | ({"frozen": self._frozen} if self._frozen else {})

    @torch.no_grad()
    def load_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        require_same_frozen(self._frozen, state.get("frozen", {}))
        copy_tensors(self.optimizer.params, state.get("model", {}), what="model")
        self.optimizer.load_state(state.get("optimizer", {}))
        if self.save_reference:
            copy_tensors(self._reference_params(), state.get("reference", {}), what="reference")

    def _reference_params(self) -> dict[str, Tensor]:
        assert isinstance(self.reference, nn.Module), "a reference of its own"
        named = self.reference.causal_lm.named_parameters()
        return {name: param.detach() for name, param in named}

    @cached_property
    def _frozen(self) -> dict[str, Tensor]:
        """Of weights that no checkpoint holds, an adapter's base or a reference: their bits,
        summed up."""
        sums = checksums(self.model.causal_lm, only_frozen=True)
        if isinstance(self.reference, nn.Module) and not self.save_reference:
            others = checksums(self.reference.causal_lm)
            sums |= {f"{REFERENCE}{name}": value for name, value in others.items()}
        return sums

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
        assert role is Role.POLICY, f"only the policy is trained, not the {role}"

    @contextmanager
    def _acting(self, role: Role) -> Iterator[Model]:
        """The module that plays a role."""
        if role is Role.POLICY:
            yield self.model
        elif isinstance(self.reference, AdapterOff):
            with adapters_off(self.model):
                yield self.model
        else:
            assert self.reference is not None, "this run has no reference model"
            yield self.reference

    def _scores(
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
            "chunk_bytes": self.config.logits_chunk_bytes,
            "numerics": model.numerics,
        }
        if entropy is EntropyNeed.NONE:
            logp_M, entropy_M = token_logprobs(*inputs, **how), None
        else:
            with_grad = entropy is EntropyNeed.GRAD
            logp_M, entropy_M = token_logprobs_and_entropy(*inputs, **how, entropy_grad=with_grad)
        return TokenScores(logp_M, entropy_M, index_M, self._send(row_of_M))

    def _terms(self, scores: TokenScores, batch: TrainBatch, spec: LossSpec) -> LossTerms:
        columns = {"weights": batch.weights_N, **batch.columns}
        return loss_terms(
            scores.logp_M,
            scores.entropy_M,
            {name: self._send(values_N)[scores.index_M] for name, values_N in columns.items()},
            row_of_M=scores.row_of_M,
            num_rows=batch.num_rows,
            spec=spec,
        )

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
