"""One rank of a trainer that is spread over several: FSDP2, the same calls on every rank.

Each rank gets its own micro-batches, in lists of the same length; None stands for nothing to do in
a round, in which the rank then only takes part. A gradient is summed over ranks (in fp32) as soon
as its micro-batch is done, so that no rank ever holds more of it than its share. `apply` brings all
ranks' shares of the report together: every rank decides on the same numbers, and so the same.

The optimizer works on each rank's own rows; nothing in it knows of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from homeostat.config.run import RunConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.errors import (
    CheckpointWriteError,
    HomeostatError,
    OutOfMemoryHaltError,
    TrainingHaltedError,
)
from homeostat.models.build import LoadedModel, ModelSheet
from homeostat.models.hf import save_hf
from homeostat.models.lora import adapter_state, merged_state, save_adapter
from homeostat.ops.memory import is_out_of_memory
from homeostat.train.forward import Forward
from homeostat.train.frozen import checksums, frozen_checksums, require_same_frozen
from homeostat.train.fsdp.mesh import Ranks, local_part
from homeostat.train.fsdp.model import give_back, whole_tensor
from homeostat.train.fsdp.replay import ShardedReplay
from homeostat.train.fsdp.sending import Sending
from homeostat.train.nonfinite import trace
from homeostat.train.optim import MasterAdamW
from homeostat.train.peak import peak_memory
from homeostat.train.probes import UpdateProbe
from homeostat.train.roles import Reference, acting, require_policy
from homeostat.train.runtime import Runtime
from homeostat.train.shards import Rows, TensorReader, copy_rows, write_shard
from homeostat.train.trainer import MemoryReport, Origin
from homeostat.train.update import Accumulated, Measured, UpdateShare, make_report, merge, to_host
from homeostat.train.writing import writing_weights
from homeostat.types import FloatArray, LossSpec, Role, StepPlan, TokenRow, TrainBatch, UpdateReport

if TYPE_CHECKING:
    from homeostat.sync.bucket import Bucket, Packer

# File stem of a checkpoint -> what it is called where it does not fit.
WHAT = {"model": "model", "optimizer": "optimizer state", "reference": "reference"}

# Two tokens, of which one is trained: every parameter takes part.
_NOTHING = TrainBatch.of([TokenRow(0, np.zeros(2, np.int64), np.ones(2, np.float32))])


class FsdpTrainer:
    """One rank. The controller's side, `train.sharded`, makes a Trainer of all of them."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: TrainerConfig,
        *,
        ranks: Ranks,
        runtime: Runtime,
        seed: int,
        reference: Reference | None = None,
        save_reference: bool = False,
    ) -> None:
        self.loaded = loaded
        self.model = loaded.module
        self.config = config
        self.ranks = ranks
        self.runtime = runtime
        self.reference = reference
        self.save_reference = save_reference
        self.forward = Forward.of(self.model, config, runtime=runtime, seed=seed)
        named = self.model.causal_lm.named_parameters()
        self.trained = {name: param for name, param in named if param.requires_grad}
        own = {name: local_part(param).requires_grad_() for name, param in self.trained.items()}
        self.optimizer = MasterAdamW(own.items(), config.optimizer)
        self.probe = UpdateProbe(
            self.optimizer, self.model.causal_lm.named_parameters, self._frozen_now
        )
        self._pending: list[Accumulated] = []
        self._sending = Sending(ranks)

    def about(self) -> ModelSheet:
        return self.loaded.sheet

    def score(
        self, role: Role, batches: Sequence[TrainBatch | None], *, temperature: float = 1.0
    ) -> list[FloatArray | None]:
        with (
            self._naming_memory(),
            torch.no_grad(),
            acting(role, self.model, self.reference) as model,
        ):
            model.eval()
            found = [
                self.forward.scores(model, batch or _NOTHING, temperature=temperature).logp_M
                for batch in batches
            ]
            model.train()
            give_back(model)
        return [
            logp_M.float().cpu().numpy() if batch is not None else None
            for batch, logp_M in zip(batches, found, strict=True)
        ]

    def accumulate(
        self, role: Role, batches: Sequence[TrainBatch | None], spec: LossSpec, *, step: int
    ) -> None:
        require_policy(role)
        self.model.train()
        with self._naming_memory():
            for batch in batches:
                if batch is None:
                    self._take_part()
                    continue
                scores, terms = self.forward.loss(self.model, batch, spec, step=step)
                terms.loss.backward()
                self._pending.append(Accumulated.of(batch, scores, terms))

    @torch.no_grad()
    def measure(
        self, role: Role, batches: Sequence[TrainBatch | None], spec: LossSpec
    ) -> Measured | None:
        """Of this rank's micro-batches; None where it had none."""
        require_policy(role)
        found = []
        self.model.eval()
        with self._naming_memory():
            for batch in batches:
                if batch is None:
                    self.forward.scores(self.model, _NOTHING, temperature=1.0)
                else:
                    found.append(self.forward.loss(self.model, batch, spec, step=0)[1])
        self.model.train()
        give_back(self.model)
        return Measured.of(found) if found else None

    def _take_part(self) -> None:
        """Gather and reduce with the others: a gradient of zero."""
        scores = self.forward.scores(self.model, _NOTHING, temperature=1.0)
        (scores.logp_M.sum() * 0.0).backward()

    def discard(self, role: Role) -> None:
        require_policy(role)
        self._pending.clear()
        for param in self.trained.values():
            param.grad = None
        self.optimizer.zero_grad()

    def apply(self, role: Role, *, step: int, learning_rate: float) -> UpdateReport:
        require_policy(role)
        with self._naming_memory():
            report = make_report(self.pending(), step=step, learning_rate=learning_rate)
            if report.applied:
                self.probe.start(step, learning_rate=learning_rate)
                with writing_weights(step):
                    self.optimizer.step(
                        learning_rate=learning_rate,
                        grad_norm=report.grad_norm,
                        max_grad_norm=self.config.max_grad_norm,
                    )
        self.discard(role)
        seen = self.probe.finish(learning_rate=learning_rate) if report.applied else None
        if seen is not None:
            # A rank that could not measure takes part all the same: the others wait for it.
            parts = self.ranks.gather(seen)[: self.ranks.num_shards]
            report = self.probe.reported(report, parts)
        interval = self.config.empty_cache_interval
        if interval and step % interval == 0:
            torch.cuda.empty_cache()
        return report

    def pending(self) -> UpdateShare:
        """What all ranks have accumulated so far."""
        for name, param in self.trained.items():
            grad = None if param.grad is None else local_part(param.grad)
            self.optimizer.params[name].grad = grad
        shares = self.ranks.gather(to_host(self._pending, self.optimizer.grad_norm()))
        norms = _same_in_all_replicas(
            [share.grad_norm for share in shares], num_shards=self.ranks.num_shards
        )
        return merge(shares, grad_norm=math.sqrt(math.fsum(norm * norm for norm in norms)))

    @torch.no_grad()
    def refresh_reference(self) -> None:
        policy = dict(self.model.causal_lm.named_parameters())
        for name, param in self._reference_params():
            local_part(param).copy_(local_part(policy[name]))

    def trace_nonfinite(self, plan: StepPlan) -> tuple[list[TokenRow], Origin]:
        return trace(ShardedReplay(self), plan)

    def weights(self, role: Role) -> Iterator[tuple[str, Tensor]]:
        """All weights under canonical HF names, adapters merged in, gathered one at a time."""
        require_policy(role)
        yield from merged_state(self.model, whole=self._whole)

    def start_buckets(self, role: Role, packer: Packer | None) -> None:
        """The first rank's packer stays with it, and is used again when it comes again."""
        self._sending.start(self.weights(role), packer)

    def next_bucket(self) -> Bucket | None:
        """On the first rank the next bucket, or None at the end; on others always None."""
        return self._sending.next_bucket()

    def checksums(self) -> Mapping[str, int]:
        named = self.model.causal_lm.named_parameters()
        return self._summed(checksums(self._computed(named)))

    def export(self, folder: Path, config: RunConfig) -> None:
        """The first rank writes; all take part in gathering."""
        if config.lora is not None and config.lora.export == "adapter":
            with self._naming_disk():
                self._export_adapter(folder, config)
            return
        write = partial(
            save_hf,
            folder=folder,
            source_config=self.about().source_config,
            generation_config=self.about().generation_config,
            max_shard_bytes=config.checkpoint.max_shard_bytes,
        )
        with self._naming_disk():
            self._write_at_first(write, self.weights(Role.POLICY))

    def _write_at_first(
        self,
        write: Callable[[Iterator[tuple[str, Tensor]]], None],
        stream: Iterator[tuple[str, Tensor]],
    ) -> None:
        try:
            if self.ranks.is_first:
                write(stream)
        finally:
            # Also where writing failed: the others gather with this rank to the end.
            for _ in stream:
                pass

    def _export_adapter(self, folder: Path, config: RunConfig) -> None:
        assert config.lora is not None
        if self.ranks.is_first:
            base = config.model.path
            save_adapter(self.model, folder, config.lora, base_path=base, whole=self._whole)
        else:
            for _, parameter in adapter_state(self.model):
                self._whole(parameter)

    def num_state_bytes(self) -> int:
        """What this rank will write, about."""
        groups = self.state().values()
        written = sum(rows.tensor.nbytes for group in groups for rows in group.values())
        return written if self.ranks.saves else 0

    def save(self, folder: Path) -> None:
        state = self.state()
        if not self.ranks.saves:
            return
        which = {"rank": self.ranks.shard, "size": self.ranks.num_shards}
        with self._naming_disk():
            for stem, group in state.items():
                write_shard(folder, stem, group, **which)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        require_same_frozen(self._frozen, TensorReader(folder, "frozen").whole())
        for stem, group in self.state().items():
            if stem != "frozen":
                copy_rows(group, TensorReader(folder, stem), what=WHAT[stem])

    def state(self) -> dict[str, dict[str, Rows]]:
        """As `LocalTrainer.state`, of which this is the rank's share: file stem -> name -> rows."""
        own, dtype = self.optimizer.params, self.runtime.dtype
        optimizer = self.optimizer.state()
        if dtype != torch.float32:
            optimizer |= {f"master.{name}": tensor for name, tensor in own.items()}
        groups = {
            "model": {n: self._rows(n, tensor.detach().to(dtype)) for n, tensor in own.items()},
            "optimizer": {
                key: self._rows(key.partition(".")[2], tensor) for key, tensor in optimizer.items()
            },
        }
        if self.save_reference:
            named = self._reference_params()
            groups["reference"] = {n: self.ranks.rows(local_part(p), p.shape) for n, p in named}
        if self._frozen:
            groups["frozen"] = {n: Rows(total, 0, ()) for n, total in self._frozen.items()}
        return groups

    def memory_report(self) -> MemoryReport:
        """Of this rank."""
        return peak_memory(self.runtime.device)

    def close(self) -> None:
        self._sending.close()
        self.ranks.close()

    def _rows(self, name: str, tensor: Tensor) -> Rows:
        shape = self.trained[name].shape if tensor.ndim else tensor.shape
        return self.ranks.rows(tensor, shape)

    def _whole(self, parameter: Tensor) -> Tensor:
        return whole_tensor(parameter, dtype=self.runtime.dtype)

    def _reference_params(self) -> Iterable[tuple[str, nn.Parameter]]:
        assert isinstance(self.reference, nn.Module), "a reference of its own"
        return self.reference.causal_lm.named_parameters()

    @cached_property
    def _frozen(self) -> dict[str, Tensor]:
        policy = self.model.causal_lm.named_parameters()
        frozen = self._computed((name, p) for name, p in policy if not p.requires_grad)
        stays = isinstance(self.reference, nn.Module) and not self.save_reference
        reference = self._computed(self._reference_params() if stays else ())
        sums = self._summed(frozen_checksums(frozen, reference))
        return {name: torch.tensor(total) for name, total in sums.items()}

    def _frozen_now(self) -> dict[str, Tensor]:
        """Checksums of this rank's part of what the optimizer does not own."""
        named, owned = self.model.causal_lm.named_parameters(), self.trained
        frozen = ((name, param) for name, param in named if name not in owned)
        return checksums(self._computed(frozen))

    def _computed(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """This rank's rows of parameters, as they are computed with."""
        return ((name, local_part(param).to(self.runtime.dtype)) for name, param in named)

    def _summed(self, sums: Mapping[str, Tensor]) -> dict[str, int]:
        """Over the ranks of a replica."""
        own = {name: int(value) for name, value in sums.items()}
        parts = self.ranks.gather(own)[: self.ranks.num_shards]
        return {name: sum(part[name] for part in parts) for name in own}

    @contextmanager
    def _naming_disk(self) -> Iterator[None]:
        """What could not be written, in a class that travels."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise CheckpointWriteError(f"rank {self.ranks.rank}: {error}") from error

    @contextmanager
    def _naming_memory(self) -> Iterator[None]:
        """The others wait for a rank that ran out of memory: there is no second try."""
        try:
            yield
        except HomeostatError:
            raise
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            why = str(error).splitlines()[0]
            raise OutOfMemoryHaltError(f"rank {self.ranks.rank}: out of memory: {why}") from None


def _same_in_all_replicas(norms: list[float], *, num_shards: int) -> list[float]:
    """Of each shard, the norm of its gradient, which all replicas must have alike."""
    first = norms[:num_shards]
    for start in range(num_shards, len(norms), num_shards):
        for shard, norm in enumerate(norms[start : start + num_shards]):
            alike = math.isclose(norm, first[shard], rel_tol=1e-6)
            if not alike and (math.isfinite(norm) or math.isfinite(first[shard])):
                raise TrainingHaltedError(
                    f"replicas came apart: ranks {shard} and {start + shard} hold the same part of "
                    f"the model, and its gradient has the norm {first[shard]:.9g} there and "
                    f"{norm:.9g} here. Nothing was applied; go back to a checkpoint."
                )
    return first
