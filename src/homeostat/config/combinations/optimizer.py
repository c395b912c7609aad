"""Find settings of optimizers, and of where their state is, that cannot work together."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.native import NativeEngineConfig
from homeostat.config.optimizer import AdamWConfig, AnyOptimizer
from homeostat.config.run import RunConfig
from homeostat.errors import Problem

OFFLOAD = "trainer.backend.offload_optimizer"
WEIGHTS = "trainer.backend.offload_params"


def find_optimizer_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of the optimizers' settings, with its reason and remedy."""
    is_sharded = config.trainer.backend.type != "local"
    for place, optimizer in _optimizers(config):
        if is_sharded:
            yield from _sharded(place, optimizer)
        if optimizer.masters == "bf16" and config.trainer.precision == "fp32":
            yield _masters_in_fp32(place, "trainer.precision=fp32")
    if config.trainer.backend.offload_params:
        yield from _weights_on_host(config)


def _weights_on_host(config: RunConfig) -> Iterator[Problem]:
    backend = config.trainer.backend
    if not backend.offload_optimizer:
        why = (
            f"the optimizer's state must be in host memory too if the weights are, and {OFFLOAD} "
            "is off."
        )
        yield Problem(WEIGHTS, why, f"Set {OFFLOAD}=true, or remove it.")
    if backend.offload_experts:
        why = "it already keeps experts in host memory, as trainer.backend.offload_experts would."
        yield Problem(WEIGHTS, why, "Remove one of the two.")
    if config.model.implementation == "transformers":
        why = "a transformers model has all its weights on one device."
        yield Problem(WEIGHTS, why, "Remove it, or set model.implementation=native.")
    if not config.model.meta_init:
        why = f"the whole model would be built on the GPU first, and {WEIGHTS} is for models that "
        yield Problem("model.meta_init", f"{why}have no room there.", "Set it to true.")
    if config.lora is not None and backend.type == "local":
        why = "the layers below an adapter are frozen and are not kept in host memory."
        way_out = "Remove it, and set model.quantization to hold the base in fewer bits."
        yield Problem(WEIGHTS, why, way_out)
    for name in ("fp8", "int4"):
        if getattr(config.trainer, name) is not None:
            why = (
                f"copies of the weights in {name} would fill the GPU memory that this key is "
                "meant to free."
            )
            yield Problem(WEIGHTS, why, f"Remove it, or trainer.{name}.")
    engine = config.engine
    is_shared = config.is_rl and engine.shares_weights
    if is_shared and isinstance(engine, NativeEngineConfig) and engine.decode != "plain":
        yield Problem(
            WEIGHTS,
            f"engine.decode={engine.decode} uses kernels that read all weights from the GPU, and "
            "this key keeps them in host memory.",
            "Set engine.decode=plain (every decoding step then streams all weights, which is "
            "slow), engine.type=vllm on another GPU, or remove it.",
        )


def find_optimizer_conflicts_on_cpu(config: RunConfig) -> Iterator[Problem]:
    """Yield the conflicts of a run on the CPU.

    Ranks may offload there, too: they do what they would do beside GPUs, and save nothing by it, so
    a recipe for GPUs can be tried.
    """
    is_local = config.trainer.backend.type == "local"
    if is_local and config.trainer.backend.offload_optimizer:
        yield Problem(
            OFFLOAD,
            "this run is on the CPU, so the optimizer's state is already in host memory.",
            "Remove it.",
        )
    if is_local and config.trainer.backend.offload_params:
        why = "this run is on the CPU, so weights are already in host memory."
        yield Problem(WEIGHTS, why, "Remove it.")
    if config.trainer.precision == "auto":
        for place, optimizer in _optimizers(config):
            if optimizer.masters == "bf16":
                yield _masters_in_fp32(place, "trainer.precision=auto is fp32 on a CPU")


def _optimizers(config: RunConfig) -> Iterator[tuple[str, AnyOptimizer]]:
    yield "trainer.optimizer", config.trainer.optimizer
    if config.critic is not None:
        yield "critic.optimizer", config.critic.optimizer


def _sharded(place: str, optimizer: AnyOptimizer) -> Iterator[Problem]:
    """Refuse what needs whole tensors, or numbers of all elements from the first on."""
    way_out = "Use adamw with moments: fp32, or set trainer.backend.type=local, for one GPU."
    if not isinstance(optimizer, AdamWConfig):
        why = f"{optimizer.type} needs whole matrices, and ranks split every tensor (fsdp)."
        yield Problem(f"{place}.type", why, way_out)
    elif optimizer.moments != "fp32":
        why = "ranks split every tensor (fsdp) and can save moments only in fp32."
        yield Problem(f"{place}.moments", why, way_out)
    if optimizer.masters != "fp32":
        why = "with fsdp, ranks keep the trained weights in fp32."
        yield Problem(f"{place}.masters", why, "Set it to fp32, or trainer.backend.type=local.")


def _masters_in_fp32(place: str, why: str) -> Problem:
    return Problem(
        f"{place}.masters",
        f"the run computes with fp32 weights ({why}), so there are no separate master weights.",
        "Set it to fp32, or trainer.precision=bf16.",
    )
