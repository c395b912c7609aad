"""The Trainer on one device.

A micro-batch goes forward and backward at once; what an update needs of it for its report stays on
the device until `apply`, which copies it to the host in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from homeostat.config.run import RunConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.models.build import LoadedModel, ModelSheet
from homeostat.models.decoder import Decoder
from homeostat.models.hf import save_hf
from homeostat.models.lora import merged_state, save_adapter
from homeostat.train.checkpoint import copy_tensors, read_tensors, write_tensors
from homeostat.train.forward import Forward
from homeostat.train.frozen import checksums, frozen_checksums, require_same_frozen
from homeostat.train.lanes import Lanes, split
from homeostat.train.nonfinite import LocalReplay, trace
from homeostat.train.optim import MasterAdamW
from homeostat.train.peak import peak_memory
from homeostat.train.probes import UpdateProbe
from homeostat.train.roles import Reference, acting, require_policy
from homeostat.train.runtime import Runtime
from homeostat.train.trainer import MemoryReport, Origin
from homeostat.train.update import Accumulated, Measured, make_report, to_host, total_loss
from homeostat.train.writing import writing_weights
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
    from homeostat.sync.bucket import Bucket, Packer


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
        self.reference = reference
        self.save_reference = save_reference
        self.forward = Forward.of(self.model, config, runtime=runtime, seed=seed)
        self.optimizer = MasterAdamW(self.model.causal_lm.named_parameters(), config.optimizer)
        named = self.model.causal_lm.named_parameters
        frozen = partial(_not_owned, named, self.optimizer)
        self.probe = UpdateProbe(self.optimizer, named, frozen)
        # What is dropped is drawn by keys that the model holds: one batch at a time.
        in_lanes = runtime.lanes > 1 and isinstance(self.model, Decoder)
        in_lanes = in_lanes and not self.forward.has_dropout
        self.lanes = Lanes(runtime.lanes, threads=runtime.threads) if in_lanes else None
        self._pending: list[Accumulated] = []

    @property
    def sheet(self) -> ModelSheet:
        return self.loaded.sheet

    @property
    def num_data_groups(self) -> int:
        return 1

    def score(
        self, role: Role, batches: Sequence[TrainBatch], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        with torch.no_grad(), acting(role, self.model, self.reference) as model:
            model.eval()
            found = [self.forward.scores(model, b, temperature=temperature) for b in batches]
            model.train()
        return [scores.logp_M.float().cpu().numpy() for scores in found]

    def accumulate(
        self, role: Role, batches: Sequence[TrainBatch], spec: LossSpec, *, step: int
    ) -> None:
        require_policy(role)
        self.model.train()
        for batch in batches:
            parts = [batch] if self.lanes is None else split(batch, self.lanes.count)
            if self.lanes is not None and len(parts) > 1:
                self._accumulate_in_lanes(parts, spec, step=step, lanes=self.lanes)
                continue
            scores, terms = self.forward.loss(self.model, batch, spec, step=step)
            terms.loss.backward()
            self._pending.append(Accumulated.of(batch, scores, terms))

    def _accumulate_in_lanes(
        self, parts: Sequence[TrainBatch], spec: LossSpec, *, step: int, lanes: Lanes
    ) -> None:
        params = self.optimizer.params

        def work(part: TrainBatch) -> tuple[Accumulated, tuple[Tensor | None, ...]]:
            scores, terms = self.forward.loss(self.model, part, spec, step=step)
            grads = torch.autograd.grad(terms.loss, tuple(params.values()), allow_unused=True)
            is_first = part is parts[0]
            return Accumulated.of(part, scores, terms, is_first=is_first), grads

        for done, grads in lanes.map(work, parts):
            self._pending.append(done)
            for name, grad in zip(params, grads, strict=True):
                if grad is not None:
                    self.optimizer.add_grad(name, grad)

    @torch.no_grad()
    def measure(self, role: Role, batches: Sequence[TrainBatch], spec: LossSpec) -> Measured:
        require_policy(role)
        self.model.eval()
        found = [self.forward.loss(self.model, batch, spec, step=0)[1] for batch in batches]
        self.model.train()
        return Measured.of(found)

    def discard(self, role: Role) -> None:
        require_policy(role)
        self._pending.clear()
        self.optimizer.zero_grad()

    def apply(self, role: Role, *, step: int, learning_rate: float) -> UpdateReport:
        require_policy(role)
        assert self._pending, "apply needs at least one accumulate before it"
        share = to_host(self._pending, self.pending_norm())
        report = make_report(share, step=step, learning_rate=learning_rate)
        if report.applied:
            self.probe.start(step, learning_rate=learning_rate)
            with writing_weights(step):
                self.optimizer.step(
                    learning_rate=learning_rate,
                    grad_norm=report.grad_norm,
                    max_grad_norm=self.config.max_grad_norm,
                )
        self.discard(role)
        if report.applied:
            report = self.probe.reported(report, [self.probe.finish(learning_rate=learning_rate)])
        interval = self.config.empty_cache_interval
        if interval and step % interval == 0:
            torch.cuda.empty_cache()
        return report

    def pending_loss(self) -> Tensor:
        """The loss accumulated so far, as a device scalar."""
        return total_loss(self._pending)

    def pending_norm(self) -> Tensor:
        """The norm of the gradient accumulated so far, as a device scalar."""
        return self.optimizer.grad_norm()

    @torch.no_grad()
    def refresh_reference(self) -> None:
        policy = dict(self.model.causal_lm.named_parameters())
        for name, param in self._reference_params():
            param.copy_(policy[name])

    def trace_nonfinite(self, plan: StepPlan) -> tuple[list[TokenRow], Origin]:
        return trace(LocalReplay(self), plan)

    def weights(self, role: Role) -> Iterator[tuple[str, Tensor]]:
        """All weights under canonical HF names, adapters merged in."""
        require_policy(role)
        yield from merged_state(self.model)

    def weight_buckets(self, role: Role, packer: Packer) -> Iterator[Bucket]:
        return packer.pack(self.weights(role))

    def checksums(self) -> dict[str, int]:
        sums = checksums(self.model.causal_lm.named_parameters())
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
        # Not all that is there: a checkpoint may hold an engine's weights, too.
        self.load_state(read_tensors(folder, only=("model", "optimizer", "reference", "frozen")))

    def memory_report(self) -> MemoryReport:
        return peak_memory(self.runtime.device)

    def close(self) -> None:
        if self.lanes is not None:
            self.lanes.close()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything an exact resume needs: file stem -> tensor name -> tensor."""
        model = {name: param.detach() for name, param in self.optimizer.params.items()}
        tensors = {"model": model, "optimizer": self.optimizer.state()}
        if self.save_reference:
            tensors["reference"] = {n: p.detach() for n, p in self._reference_params()}
        return tensors | ({"frozen": self._frozen} if self._frozen else {})

    @torch.no_grad()
    def load_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        require_same_frozen(self._frozen, state.get("frozen", {}))
        copy_tensors(self.optimizer.params, state.get("model", {}), what="model")
        self.optimizer.load_state(state.get("optimizer", {}))
        if self.save_reference:
            own = dict(self._reference_params())
            copy_tensors(own, state.get("reference", {}), what="reference")

    def _reference_params(self) -> Iterable[tuple[str, nn.Parameter]]:
        assert isinstance(self.reference, nn.Module), "a reference of its own"
        return self.reference.causal_lm.named_parameters()

    @cached_property
    def _frozen(self) -> dict[str, Tensor]:
        stays = isinstance(self.reference, nn.Module) and not self.save_reference
        reference = self._reference_params() if stays else ()
        return frozen_checksums(self.model.causal_lm.named_parameters(), reference)


def _not_owned(
    named: Callable[[], Iterable[tuple[str, nn.Parameter]]], optimizer: MasterAdamW
) -> dict[str, Tensor]:
    """Return checksums of what the optimizer does not own: the weights under an adapter."""
    return checksums((name, param) for name, param in named() if name not in optimizer.params)
