"""Builds the models of a trainer from a recipe: the policy, the reference if the loss needs one,
the critic of PPO, and the model of an energy's features. All backends use this file, so that they
build the same models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

from homeostat.config.cluster import OnHost
from homeostat.config.critic import CriticConfig
from homeostat.config.model import HeadInit, LoraConfig, ModelConfig
from homeostat.config.parts import TrainerSetup
from homeostat.config.rollout import AdapterOffReference, CheckpointReference, InitialReference
from homeostat.errors import ModelError
from homeostat.models.build import LoadedModel, ModelSheet, load_model
from homeostat.models.decoder import Decoder
from homeostat.models.expert_offload import require_experts, stream_experts
from homeostat.models.layer_offload import stream_layers
from homeostat.precision.bases import base_rewrite
from homeostat.train.expert_bias import is_expert_bias
from homeostat.train.local import LocalTrainer
from homeostat.train.precision import rewritten
from homeostat.train.roles import RoleModel
from homeostat.train.runtime import Runtime
from homeostat.types import Role


class LoadModel(Protocol):
    """Builds a model as a backend does; one that is not `trained` needs no gradients, and one with
    a `head` has a value head (models/value_head.py)."""

    def __call__(
        self,
        model: ModelConfig,
        lora: LoraConfig | None,
        *,
        trained: bool,
        head: HeadInit | None = None,
    ) -> LoadedModel: ...


def local_trainer(config: TrainerSetup, runtime: Runtime) -> LocalTrainer:
    load_here = partial(load, config=config, runtime=runtime)
    models = role_models(config, load_here, starting_policy=_frozen_copy)
    _stream(models, config.trainer.backend.on_host, runtime)
    models = rewritten(models, config.trainer, device=runtime.device)
    return LocalTrainer(models, config.trainer, runtime=runtime, seed=config.seed)


def _stream(models: Mapping[Role, RoleModel], on_host: OnHost | None, runtime: Runtime) -> None:
    if on_host is None:
        return
    if on_host == "experts":
        require_experts(models[Role.POLICY].loaded.sheet.moe)
    stream = stream_experts if on_host == "experts" else stream_layers
    # A role may borrow another one's module.
    for module in dict.fromkeys(model.loaded.module for model in models.values()):
        assert isinstance(module, Decoder), "combinations asks for the native decoder"
        stream(module, device=runtime.device)


def role_models(
    config: TrainerSetup,
    load: LoadModel,
    *,
    starting_policy: Callable[[LoadedModel], LoadedModel],
) -> dict[Role, RoleModel]:
    """The models of a run by their roles. `starting_policy` returns a frozen model with the initial
    weights of the policy.
    """
    policy = load(config.model, config.lora, trained=True, head=config.head)
    rate = config.model.moe.router_bias_update_rate
    alone = config.lora is not None and config.lora.publish == "adapter"
    models = {
        Role.POLICY: RoleModel(policy, config=config.trainer, bias_rate=rate, sends_adapter=alone)
    }
    choice = config.used_reference
    if isinstance(choice, AdapterOffReference):
        models[Role.REFERENCE] = RoleModel(policy, without_adapter=True)
    elif isinstance(choice, CheckpointReference):
        models[Role.REFERENCE] = RoleModel(_from_checkpoint(config, load, choice, policy.sheet))
    elif choice is not None and not config.precomputes_reference:
        # A starting policy that only scores before the first step needs no copy.
        changes = choice.refresh_steps is not None
        models[Role.REFERENCE] = RoleModel(starting_policy(policy), changes=changes)
    if config.critic is not None:
        loaded = _critic_model(config, config.critic, load, policy.sheet)
        how = config.critic.trained_as(config.trainer)
        models[Role.CRITIC] = RoleModel(loaded, config=how, bias_rate=rate)
    if config.energy is not None:
        models[Role.FEATURES] = _features(config, models, starting_policy)
    return models


def critic_lora(critic: CriticConfig, lora: LoraConfig | None) -> LoraConfig | None:
    """Return the settings of the critic's adapter: the policy's, but new if the critic starts from
    another model.
    """
    if lora is None or critic.path is None:
        return lora
    return lora.model_copy(update={"path": None})


def _critic_model(
    config: TrainerSetup, critic: CriticConfig, load: LoadModel, policy: ModelSheet
) -> LoadedModel:
    start, lora = critic.start(config.model), critic_lora(critic, config.lora)
    with naming("critic.path" if critic.path else "model.path"):
        loaded = load(start, lora, trained=True, head=critic.head_init)
    _require_vocabulary("critic.path", loaded.sheet, policy)
    return loaded


def _features(
    config: TrainerSetup,
    models: Mapping[Role, RoleModel],
    starting_policy: Callable[[LoadedModel], LoadedModel],
) -> RoleModel:
    """Return the model from which the run starts. It never changes, so it may have other roles."""
    policy = models[Role.POLICY].loaded
    if copies_features(config):
        return RoleModel(starting_policy(policy))
    if _starts_bare(config):
        return RoleModel(policy, without_adapter=True)
    return models[Role.REFERENCE]


def copies_features(config: TrainerSetup) -> bool:
    """Return whether the features of an energy need a copy of the starting policy."""
    if config.energy is None or _starts_bare(config):
        return False
    reference = config.used_reference
    return not isinstance(reference, InitialReference) or reference.refresh_steps is not None


def _starts_bare(config: TrainerSetup) -> bool:
    """Return whether the starting policy is the model without its adapter."""
    return config.lora is not None and config.lora.is_new


def _from_checkpoint(
    config: TrainerSetup, load: LoadModel, choice: CheckpointReference, policy: ModelSheet
) -> LoadedModel:
    with naming("reference.path"):
        loaded = load(reference_model(config.model, choice), None, trained=False)
    _require_vocabulary("reference.path", loaded.sheet, policy)
    return loaded


def _require_vocabulary(setting: str, sheet: ModelSheet, policy: ModelSheet) -> None:
    if policy.vocab_size != sheet.vocab_size:
        raise ModelError(
            f"{setting}: the model has a vocabulary of {sheet.vocab_size} tokens and the policy "
            f"one of {policy.vocab_size}, so they do not use the same tokens."
        )


def reference_model(model: ModelConfig, choice: CheckpointReference) -> ModelConfig:
    return model.model_copy(update={"path": choice.path, "init": "pretrained"})


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Make errors about another model than the policy name its own key."""
    try:
        yield
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", setting)) from None


def load(
    model: ModelConfig,
    lora: LoraConfig | None,
    *,
    config: TrainerSetup,
    runtime: Runtime,
    trained: bool = True,
    head: HeadInit | None = None,
) -> LoadedModel:
    """Build a model in this process."""
    loaded = load_model(
        model,
        lora,
        dtype=runtime.dtype,
        device=runtime.device,
        seed=config.seed,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
        head=head,
        on_host=config.trainer.backend.on_host,
        hold=base_rewrite(model),
    )
    if not trained:
        loaded.module.requires_grad_(False)
    return loaded


def _frozen_copy(policy: LoadedModel) -> LoadedModel:
    """Made before the optimizer hangs its hooks on the parameters. What no update changes, the
    base of an adapter, is shared with the policy; expert biases may be moved without a gradient."""
    named = policy.module.named_parameters()
    shared = {id(p): p for name, p in named if not (p.requires_grad or is_expert_bias(name))}
    module = copy.deepcopy(policy.module, shared)
    return replace(policy, module=module.requires_grad_(False))
