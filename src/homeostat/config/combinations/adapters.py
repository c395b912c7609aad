"""Find settings of quantised bases and of kinds of adapters that cannot work together."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.run import RunConfig
from homeostat.errors import Problem


def find_base_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of `model.quantization` and `lora.dora`, with reason and remedy."""
    model, backend = config.model, config.trainer.backend
    if config.lora is not None and config.lora.dora and backend.type != "local":
        yield Problem(
            "lora.dora",
            "DoRA needs whole weights to compute the lengths of their rows, and each rank holds "
            "only a shard of them.",
            "Set trainer.backend.type=local, or lora.dora=false.",
        )
    if model.double_quantization and model.quantization != "nf4":
        yield Problem(
            "model.double_quantization",
            "only nf4 has block scales that can be quantised.",
            "Set model.quantization=nf4, or remove it.",
        )
    if model.quantization is None:
        return
    if config.lora is None:
        yield Problem(
            "model.quantization",
            "quantised weights are frozen, and without an adapter nothing would be trained.",
            "Set lora (for example lora.rank=16), or remove model.quantization.",
        )
    if model.implementation == "transformers":
        yield Problem(
            "model.quantization",
            "only the native decoder can quantise the base model.",
            "Set model.implementation=native, or remove model.quantization.",
        )
    for name in ("fp8", "int4"):
        if getattr(config.trainer, name) is not None:
            yield Problem(
                f"trainer.{name}",
                "it needs weights that are not quantised, and "
                f"model.quantization={model.quantization} keeps none.",
                f"Remove trainer.{name} or model.quantization.",
            )
    if backend.type == "local" and backend.on_host is not None:
        yield Problem(
            f"trainer.backend.offload_{'experts' if backend.offload_experts else 'params'}",
            "the weights of a quantised base model cannot be streamed from host memory.",
            "Remove it, or remove model.quantization.",
        )
    if not model.meta_init:
        yield Problem(
            "model.meta_init",
            "a quantised base model is loaded weight by weight and never allocated as a whole.",
            "Set it to true, or remove model.quantization.",
        )
    if backend.type != "local":
        yield Problem(
            "model.quantization",
            "quantised weights cannot be split over ranks, and trainer.backend.type is "
            f"{backend.type}.",
            "Set trainer.backend.type=local, or remove model.quantization.",
        )
