"""Creates one rank of a sharded trainer from a recipe."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from homeostat.config.cluster import FsdpBackend
from homeostat.config.parts import TrainerSetup
from homeostat.config.ranks import RanksCluster
from homeostat.errors import ConfigError, Problem
from homeostat.train.build import role_models
from homeostat.train.cores import Way
from homeostat.train.fsdp.mesh import join
from homeostat.train.fsdp.model import load_sharded
from homeostat.train.fsdp.trainer import FsdpTrainer
from homeostat.train.runtime import device_of, runtime_on
from homeostat.workers.context import WorkerContext


def make_trainer(
    context: WorkerContext, *, config: TrainerSetup, threads: int, rendezvous: str = "env://"
) -> FsdpTrainer:
    """A rank, from a recipe. `rendezvous` is where ranks meet, as torch.distributed names it."""
    backend = config.trainer.backend
    assert isinstance(backend, FsdpBackend), "refused by config/combinations"
    runtime = runtime_on(device_of(config), config, kept=Way(1, threads))
    if runtime.device.type == "cuda":
        if not torch.cuda.is_available():
            why = f"rank {context.rank} on {context.host} can use no CUDA device."
            raise ConfigError(
                [Problem("trainer.device", why, ("Run `homeostat env` on that machine."))]
            )
        # The launcher of the rank may have made only one GPU visible to it.
        own = context.local_rank % torch.cuda.device_count()
        runtime = replace(runtime, device=torch.device("cuda", own))
        torch.cuda.set_device(runtime.device)
    cluster = config.cluster
    assert isinstance(cluster, RanksCluster), "refused by config/combinations"
    ranks = join(
        context,
        config.mesh,
        device=runtime.device,
        timeout_s=cluster.timeout_s,
        backend=cluster.backend,
        rendezvous=rendezvous,
    )
    load = partial(
        load_sharded,
        backend=backend,
        ranks=ranks,
        runtime=runtime,
        seed=config.seed,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
    )
    models = role_models(
        config,
        load,
        # The policy before its first update is what its files and the seed make of it.
        starting_policy=lambda policy: load(config.model, config.lora, trained=False),
    )
    return FsdpTrainer(models, config.trainer, ranks=ranks, runtime=runtime, seed=config.seed)
