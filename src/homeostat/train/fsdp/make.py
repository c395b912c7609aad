"""One rank of a sharded trainer, from a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from homeostat.config.cluster import FsdpBackend, TorchrunCluster
from homeostat.config.rollout import AdapterOffReference, CheckpointReference
from homeostat.config.run import RunConfig
from homeostat.models.build import LoadedModel, ModelSheet
from homeostat.train.build import (
    named_reference,
    reference_model,
    reference_of,
    require_same_vocabulary,
    saves_reference,
)
from homeostat.train.cores import Way
from homeostat.train.fsdp.mesh import join
from homeostat.train.fsdp.model import load_sharded
from homeostat.train.fsdp.trainer import FsdpTrainer
from homeostat.train.roles import AdapterOff, Reference
from homeostat.train.runtime import resolve_runtime
from homeostat.workers.context import WorkerContext


def make_trainer(
    context: WorkerContext, *, config: RunConfig, threads: int, rendezvous: str = "env://"
) -> FsdpTrainer:
    """A rank, from a recipe. `rendezvous` is where ranks meet, as torch.distributed names it."""
    backend = config.trainer.backend
    assert isinstance(backend, FsdpBackend), "refused by config.combinations"
    runtime = resolve_runtime(config, kept=Way(1, threads))
    if runtime.device.type == "cuda":
        runtime = replace(runtime, device=torch.device("cuda", context.local_rank))
        torch.cuda.set_device(runtime.device)
    timeout_s = config.cluster.timeout_s if isinstance(config.cluster, TorchrunCluster) else 600.0
    ranks = join(
        context, config.mesh, device=runtime.device, timeout_s=timeout_s, rendezvous=rendezvous
    )
    load = partial(
        load_sharded,
        backend=backend,
        ranks=ranks,
        runtime=runtime,
        seed=config.seed,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
    )
    loaded = load(config.model, config.lora, trained=True)
    return FsdpTrainer(
        loaded,
        config.trainer,
        ranks=ranks,
        runtime=runtime,
        seed=config.seed,
        reference=_reference(config, partial(load, trained=False), loaded.sheet),
        save_reference=saves_reference(config),
    )


def _reference(
    config: RunConfig, load: Callable[..., LoadedModel], policy: ModelSheet
) -> Reference | None:
    choice = reference_of(config)
    if choice is None:
        return None
    if isinstance(choice, AdapterOffReference):
        return AdapterOff()
    if isinstance(choice, CheckpointReference):
        with named_reference():
            loaded = load(reference_model(config.model, choice), None)
        sizes = {"policy": policy.vocab_size, "reference": loaded.sheet.vocab_size}
        require_same_vocabulary(choice.path, **sizes)
        return loaded.module
    # The policy before its first update is what its files and the seed make of it.
    return load(config.model, config.lora).module
