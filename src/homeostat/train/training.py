"""Start the training of a model: its optimizer, and the probe that measures its updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial

from torch import Tensor, nn

from homeostat.config.trainer import TrainerConfig
from homeostat.train.expert_bias import expert_biases
from homeostat.train.frozen import checksums
from homeostat.train.optim import MasterOptimizer
from homeostat.train.probes import UpdateProbe
from homeostat.train.roles import RoleModel, Training
from homeostat.train.runtime import Runtime
from homeostat.train.sharding import Shards


def start_training(
    model: RoleModel, config: TrainerConfig, *, shards: Shards, runtime: Runtime, seed: int
) -> Training:
    """Give a model that is trained its optimizer and the probe of its updates."""
    named = model.loaded.module.causal_lm.named_parameters
    params = {name: param for name, param in named() if param.requires_grad}
    biases = expert_biases(named()) if model.bias_rate > 0 else {}
    owned = ((name, shards.owned(param)) for name, param in params.items())
    away = runtime.device if config.backend.offload_optimizer else None
    optimizer = MasterOptimizer(owned, config.optimizer, seed=seed, offload_to=away)
    frozen = partial(_not_trained, named, params.keys() | biases.keys(), shards)
    probe = UpdateProbe(optimizer, named, frozen)
    return Training(config, params, optimizer, probe, biases, model.bias_rate)


def _not_trained(
    named: Callable[[], Iterable[tuple[str, nn.Parameter]]],
    trained: Collection[str],
    shards: Shards,
) -> dict[str, Tensor]:
    """Checksums of this rank's part of the weights under an adapter."""
    return checksums((name, shards.computed(p)) for name, p in named() if name not in trained)
