"""Find settings of a model's experts that cannot work together."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.kind import RunKind
from homeostat.config.native import NativeEngineConfig
from homeostat.config.run import RunConfig
from homeostat.errors import Problem


def find_moe_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of the experts' settings, with its reason and remedy."""
    moe = config.model.moe
    if config.model.implementation == "transformers":
        for name in sorted(moe.model_fields_set):
            yield Problem(
                f"model.moe.{name}",
                "transformers models compute the routing of their experts themselves.",
                "Remove it, or set model.implementation=native.",
            )
    yield from _balancing(config)
    if moe.capacity_factor is not None:
        yield from _capacity(config)
    if config.trainer.backend.offload_experts:
        yield from _offloaded(config)


def _balancing(config: RunConfig) -> Iterator[Problem]:
    moe = config.model.moe
    by_loss = moe.balancing in ("aux", "sequence_aux")
    if by_loss and moe.aux_loss_coefficient == 0:
        yield Problem(
            "model.moe.balancing",
            f"{moe.balancing} adds a loss, and the weight of this loss "
            "(model.moe.aux_loss_coefficient) is 0.",
            "Set model.moe.aux_loss_coefficient (for example 0.001), or balancing to none.",
        )
    if not by_loss and moe.aux_loss_coefficient > 0:
        yield Problem(
            "model.moe.aux_loss_coefficient",
            f"model.moe.balancing={moe.balancing} adds no loss, so this key would have no effect.",
            "Set model.moe.balancing to aux or sequence_aux, or remove it.",
        )
    if moe.balancing == "bias" and moe.router_bias_update_rate == 0:
        yield Problem(
            "model.moe.balancing",
            "bias changes the expert bias by model.moe.router_bias_update_rate, which is 0.",
            "Set model.moe.router_bias_update_rate (for example 0.001), or balancing to none.",
        )
    if moe.balancing == "bias" and config.lora is not None:
        yield Problem(
            "model.moe.balancing",
            "bias changes weights of the base model, which stay frozen if an adapter is trained.",
            "Use aux or sequence_aux, or remove lora.",
        )
    if moe.balancing != "bias" and moe.router_bias_update_rate > 0:
        yield Problem(
            "model.moe.router_bias_update_rate",
            f"model.moe.balancing={moe.balancing} does not change the expert bias, so this key "
            "would have no effect.",
            "Set model.moe.balancing=bias, or remove it.",
        )


def _capacity(config: RunConfig) -> Iterator[Problem]:
    why = "which tokens an expert drops depends on the other tokens of the micro-batch"
    if config.is_rl:
        yield Problem(
            "model.moe.capacity_factor",
            f"{why}, so the trainer's log-probs would not be those of the policy that sampled.",
            "Remove it: it works in supervised fine-tuning and with reward models only.",
        )
    if config.kind is RunKind.PREFERENCE:
        yield Problem(
            "model.moe.capacity_factor",
            f"{why}, so the log-probs of a pair would not be comparable with the reference's.",
            "Remove it: it works in supervised fine-tuning and with reward models only.",
        )
    if config.model.numerics == "invariant":
        yield Problem(
            "model.moe.capacity_factor",
            f"{why}, and with model.numerics=invariant a token's log-prob must not depend on them.",
            "Remove it, or set model.numerics=fast.",
        )


def _offloaded(config: RunConfig) -> Iterator[Problem]:
    key = "trainer.backend.offload_experts"
    if config.trainer.backend.type != "local":
        yield Problem(
            key,
            "with fsdp, ranks split every tensor, including those of experts, and gather a layer "
            "to compute it.",
            "Use trainer.backend.offload_params, which keeps all of them in host memory, or "
            "trainer.backend.type=local, for one GPU.",
        )
    if config.model.implementation == "transformers":
        yield Problem(
            key,
            "a transformers model has all its weights on one device.",
            "Remove it, or set model.implementation=native.",
        )
    if not config.model.meta_init:
        yield Problem(
            "model.meta_init",
            f"the whole model would be built on the GPU first, and {key} is for models that have "
            "no room there.",
            "Set it to true.",
        )
    engine = config.engine
    if config.is_rl and isinstance(engine, NativeEngineConfig) and engine.shares_weights:
        if engine.decode != "plain":
            yield Problem(
                "engine.decode",
                f"{engine.decode} uses kernels that read all experts from the GPU, and {key} "
                "keeps them in host memory.",
                "Set it to plain (every decoding step then streams all experts, which is slow), "
                f"engine.type=vllm on another GPU, or remove {key}.",
            )
