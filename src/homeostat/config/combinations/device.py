"""Find settings that cannot work on the device that a run uses."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.combinations.engine import find_transport_conflicts
from homeostat.config.combinations.optimizer import find_optimizer_conflicts_on_cpu
from homeostat.config.ranks import RanksCluster
from homeostat.config.run import RunConfig
from homeostat.errors import Problem

# Smallest logits chunk in invariant numerics: 32 rows of 8192 fp32 logits (see ops/logprobs.py).
INVARIANT_CHUNK_BYTES = 2**20


def find_device_conflicts(config: RunConfig, *, device: str) -> list[Problem]:
    """Return the conflicts that depend on the device.

    `device` is 'cpu' or 'cuda', as trainer.device was resolved.
    """
    problems = list(_on_cpu(config) if device == "cpu" else _on_gpu(config))
    return problems + list(find_transport_conflicts(config, device=device))


def _on_cpu(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.pin_memory:
        yield Problem(
            "trainer.pin_memory",
            "page-locked memory speeds up copies to a GPU, and this run is on the CPU.",
            "Remove it.",
        )
    if trainer.empty_cache_interval > 0:
        yield Problem(
            "trainer.empty_cache_interval",
            "it releases cached GPU memory, and this run is on the CPU.",
            "Remove it.",
        )
    if trainer.backend.offload_experts:
        yield Problem(
            "trainer.backend.offload_experts",
            "this run is on the CPU, so experts are already in host memory.",
            "Remove it.",
        )
    if isinstance(config.cluster, RanksCluster) and config.cluster.backend == "nccl":
        yield Problem(
            "cluster.backend",
            "NCCL connects GPUs, and this run is on the CPU.",
            "Remove it, or set it to gloo.",
        )
    yield from find_optimizer_conflicts_on_cpu(config)
    if config.model.attention == "varlen":
        yield Problem(
            "model.attention",
            "varlen attention has no CPU kernel.",
            "Use auto, sdpa or eager.",
        )
    if config.model.numerics == "invariant":
        yield from _invariant_on_cpu(config)


def _invariant_on_cpu(config: RunConfig) -> Iterator[Problem]:
    if config.trainer.precision == "bf16":
        yield Problem(
            "model.numerics",
            "on the CPU, invariant numerics need fp32.",
            "Set trainer.precision=fp32, or model.numerics=fast.",
        )
    if config.trainer.logits_bytes("cpu") < INVARIANT_CHUNK_BYTES:
        yield Problem(
            "trainer.logits_chunk_bytes",
            f"on the CPU, invariant numerics compute logits in tiles of {INVARIANT_CHUNK_BYTES} "
            "bytes, which is more than this key allows.",
            "Raise it, or set model.numerics=fast.",
        )


def _on_gpu(config: RunConfig) -> Iterator[Problem]:
    if (config.trainer.lanes or 1) > 1:
        yield Problem(
            "trainer.lanes",
            "lanes share the cores of a CPU, and this run is on a GPU.",
            "Remove it.",
        )
    if config.engine.num_helpers > 0:
        yield Problem(
            "engine.processes",
            "helpers share the cores of a CPU, and this run is on a GPU.",
            "Remove it.",
        )
