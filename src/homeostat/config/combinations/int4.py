"""Find settings that cannot work together with trainer.int4."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.run import RunConfig
from homeostat.errors import Problem


def find_int4_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of trainer.int4, with its reason and remedy."""
    if config.trainer.int4 is None:
        return
    if config.trainer.fp8 is not None:
        yield Problem(
            "trainer.int4",
            "trainer.fp8 is set too, and a layer can have only one precision.",
            "Remove one of the two.",
        )
    if config.lora is not None:
        yield Problem(
            "trainer.int4",
            "lora trains an adapter and freezes the weights, so the weights cannot adapt to the "
            "rounding, and merged weights would be rounded again.",
            "Remove lora, or remove trainer.int4 (a quantised base is model.quantization).",
        )
    if config.model.implementation == "transformers":
        yield Problem(
            "trainer.int4",
            "only the layers of the native decoder can be rewritten to INT4.",
            "Set model.implementation=native, or remove it.",
        )
    if config.trainer.backend.type != "local":
        yield Problem(
            "trainer.int4",
            "the rounded copies of the weights must be on one device, and fsdp splits the "
            "weights over ranks.",
            "Set trainer.backend.type=local, or remove it.",
        )
    if config.trainer.backend.offload_experts:
        yield Problem(
            "trainer.int4",
            "trainer.backend.offload_experts leaves experts in host memory, where they are not "
            "rounded.",
            "Remove one of the two.",
        )


def find_late_int4(config: RunConfig, *, total_steps: int) -> Iterator[Problem]:
    """Yield the conflict of a first INT4 step that never comes."""
    int4 = config.trainer.int4
    if int4 is not None and int4.start_step > total_steps:
        yield Problem(
            "trainer.int4.start_step",
            f"the run ends after step {total_steps}, so INT4 would have no effect.",
            "Lower it, or remove trainer.int4.",
        )
