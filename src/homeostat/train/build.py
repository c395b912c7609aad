"""From a recipe to the models that a trainer works with: the policy and, where a KL term asks for
one, the reference. Every backend decides here, so that all of them decide alike.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.config.rollout import (
    AdapterOffReference,
    AnyReference,
    CheckpointReference,
    InitialReference,
)
from homeostat.config.run import RunConfig
from homeostat.errors import ModelError
from homeostat.models.build import LoadedModel, load_model
from homeostat.train.local import LocalTrainer
from homeostat.train.roles import AdapterOff, Reference
from homeostat.train.runtime import Runtime


def local_trainer(config: RunConfig, runtime: Runtime) -> LocalTrainer:
    loaded = load(config.model, config.lora, config=config, runtime=runtime)
    return LocalTrainer(
        loaded,
        config.trainer,
        runtime=runtime,
        seed=config.seed,
        reference=_reference(reference_of(config), loaded, config, runtime),
        save_reference=saves_reference(config),
    )


def load(
    model: ModelConfig, lora: LoraConfig | None, *, config: RunConfig, runtime: Runtime
) -> LoadedModel:
    return load_model(
        model,
        lora,
        dtype=runtime.dtype,
        device=runtime.device,
        seed=config.seed,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
    )


def reference_of(config: RunConfig) -> AnyReference | None:
    """The reference that a KL term asks for; None where there is no such term.

    By default it is the policy that the run starts from. Under a fresh adapter, which adds nothing
    at first, that is the model without it: no copy is needed. An adapter that was loaded
    (lora.path) is part of the starting policy.
    """
    if not config.is_rl or config.algorithm.kl is None:
        return None
    if config.reference is not None:
        return config.reference
    starts_bare = config.lora is not None and config.lora.path is None
    return AdapterOffReference(type="adapter_off") if starts_bare else InitialReference()


def saves_reference(config: RunConfig) -> bool:
    """A reference that changes on the way is part of a checkpoint."""
    choice = reference_of(config)
    return isinstance(choice, InitialReference) and choice.refresh_steps is not None


def reference_model(model: ModelConfig, choice: CheckpointReference) -> ModelConfig:
    return model.model_copy(update={"path": choice.path, "init": "pretrained"})


@contextmanager
def named_reference() -> Iterator[None]:
    """What is wrong with a reference is said of its own key, not of the policy's."""
    try:
        yield
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", "reference.path")) from None


def require_same_vocabulary(path: str, *, policy: int, reference: int) -> None:
    if policy != reference:
        raise ModelError(
            f"reference.path: {path} has a vocabulary of {reference}, and the policy one of "
            f"{policy}: they cannot be compared."
        )


def _reference(
    choice: AnyReference | None, loaded: LoadedModel, config: RunConfig, runtime: Runtime
) -> Reference | None:
    if choice is None:
        return None
    if isinstance(choice, AdapterOffReference):
        return AdapterOff()
    if isinstance(choice, CheckpointReference):
        with named_reference():
            model = reference_model(config.model, choice)
            other = load(model, None, config=config, runtime=runtime)
        sizes = {"policy": loaded.sheet.vocab_size, "reference": other.sheet.vocab_size}
        require_same_vocabulary(choice.path, **sizes)
        module = other.module
    else:
        # Before the optimizer hangs its hooks on the parameters. What no update changes, the base
        # of an adapter, is shared with the policy.
        shared = {id(p): p for p in loaded.module.parameters() if not p.requires_grad}
        module = copy.deepcopy(loaded.module, shared)
    return module.requires_grad_(False)
