"""Set up the state of a role when a trainer starts: its forward pass, its optimizer, its probe."""

from __future__ import annotations

from functools import partial

from homeostat.config.trainer import TrainerConfig
from homeostat.train.expert_bias import expert_biases
from homeostat.train.forward import Forward
from homeostat.train.optimizers.optimizer import MasterOptimizer
from homeostat.train.probes import UpdateProbe
from homeostat.train.roles import RoleModel, RoleState, Training
from homeostat.train.runtime import Runtime
from homeostat.train.saving.frozen import not_trained
from homeostat.train.sharding import Shards
from homeostat.types import Role


def role_state(
    role: Role,
    model: RoleModel,
    config: TrainerConfig,
    *,
    shards: Shards,
    runtime: Runtime,
    seed: int,
) -> RoleState:
    """Return the state of a role; one that is trained has an optimizer."""
    module = model.loaded.module
    how = {"shards": shards, "runtime": runtime, "seed": seed}
    return RoleState(
        role=role,
        model=module,
        sheet=model.loaded.sheet,
        forward=Forward.of(module, config, runtime=runtime, seed=seed, links=shards.links),
        training=None if model.config is None else _start_training(model, model.config, **how),
        changes=model.changes,
        without_adapter=model.without_adapter,
        rewrites=model.rewrites,
        sends_adapter=model.sends_adapter,
    )


def _start_training(
    model: RoleModel, config: TrainerConfig, *, shards: Shards, runtime: Runtime, seed: int
) -> Training:
    named = model.loaded.module.causal_lm.named_parameters
    params = {name: param for name, param in named() if param.requires_grad}
    biases = expert_biases(named()) if model.bias_rate > 0 else {}
    owned = ((name, shards.owned(param)) for name, param in params.items())
    away = runtime.device if config.backend.offload_optimizer else None
    optimizer = MasterOptimizer(owned, config.optimizer, seed=seed, offload_to=away)
    frozen = partial(not_trained, named, params.keys() | biases.keys(), shards.computed)
    probe = UpdateProbe(optimizer, named, frozen)
    return Training(config, params, optimizer, probe, biases, model.bias_rate)
