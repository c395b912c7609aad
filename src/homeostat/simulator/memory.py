"""Bytes of one GPU: of a trainer rank, and of an engine's rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from homeostat.simulator.layout import Layout
from homeostat.simulator.machine import Machine
from homeostat.simulator.shape import ModelShape
from homeostat.simulator.workload import Workload

# Kept for the allocator, CUDA and NCCL.
RESERVED_BYTES = 4e9
# Numbers that a layer keeps of a token for the backward pass, in hidden and in intermediate sizes:
# fitted to measured peaks of 135 M and 1.5 B on an H200 (bench/results/estimate_cuda.json).
_KEPT_HIDDEN, _KEPT_INTERMEDIATE = 7.2, 2.7


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of one GPU, and of its share of host memory."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    reference: float = 0.0
    # Gathered layers, kept activations and logits of one micro-batch.
    work: float = 0.0
    engine_weights: float = 0.0
    # The least cache with which an engine serves one completion of full length on each place.
    cache: float = 0.0
    host: float = 0.0
    # Whether trainer and engine are on the same GPU, where they take turns.
    colocated: bool = True

    @property
    def training(self) -> float:
        """Bytes of a trainer's GPU while it trains; its engine sleeps."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.work

    @property
    def sampling(self) -> float:
        """Bytes of an engine's GPU; no gradients or activations are there."""
        held = self.weights + self.optimizer + self.reference if self.colocated else 0.0
        return held + self.engine_weights + self.cache

    @property
    def peak(self) -> float:
        """Return the larger of the two, with what is kept for the allocator."""
        return max(self.training, self.sampling) + RESERVED_BYTES


def trainer_memory(
    shape: ModelShape, workload: Workload, layout: Layout, *, dtype_bytes: int = 2
) -> GpuMemory:
    """Return the bytes of one trainer rank with AdamW: moments and gradients are in fp32.

    One GPU holds weights in the compute dtype beside fp32 masters. Ranks hold their share of the
    masters alone, and cast what they gather.
    """
    shards = layout.mesh.num_shards
    trained = shape.num_params if workload.adapter_params is None else workload.adapter_params
    frozen = (shape.num_params if workload.adapter_params is not None else 0) * dtype_bytes
    has_copies = layout.trainer_gpus == 1 and dtype_bytes < 4
    weights = (frozen + trained * (dtype_bytes if has_copies else 4.0)) / shards
    gradients = trained * 4.0 / shards
    state = trained * (12.0 if has_copies else 8.0) / shards
    copy = shape.num_params * dtype_bytes / shards if workload.holds_reference else 0.0
    away = layout.offload_params
    return GpuMemory(
        weights=0.0 if away else weights,
        gradients=0.0 if away else gradients,
        optimizer=0.0 if layout.offload_optimizer else state,
        reference=0.0 if away else copy,
        work=gathered_bytes(shape, layout, dtype_bytes=dtype_bytes)
        + activation_bytes(shape, workload, layout, dtype_bytes=dtype_bytes),
        host=(state if layout.offload_optimizer else 0.0)
        + (weights + gradients + copy if away else 0.0),
    )


def gathered_bytes(shape: ModelShape, layout: Layout, *, dtype_bytes: int = 2) -> float:
    """Return the bytes of two gathered layers, one layer's gradients, and the gathered tables."""
    if layout.mesh.num_shards == 1:
        return 0.0
    routed = shape.routed_params * (1 - 1 / layout.expert_parallel_size)
    tables = shape.head_params * (1 if shape.tied else 2)
    layer = (shape.num_params - tables - routed) / shape.layers
    return layer * (2 * dtype_bytes + 4) + tables * dtype_bytes


def activation_bytes(
    shape: ModelShape, workload: Workload, layout: Layout, *, dtype_bytes: int = 2
) -> float:
    """Return the bytes that one micro-batch keeps between forward and backward on one rank."""
    mesh = layout.mesh
    # A row is never cut but by context and sequence parallelism.
    tokens = max(workload.max_tokens, workload.longest / (mesh.cp * mesh.sp))
    width = _KEPT_HIDDEN * shape.hidden + _KEPT_INTERMEDIATE * _mlp_width(shape)
    full = tokens * width * dtype_bytes
    logits = min(tokens, 4096) * shape.vocab * 4.0
    if not layout.gradient_checkpointing:
        return full * shape.layers + logits
    return tokens * shape.hidden * dtype_bytes * shape.layers + full + logits


def _mlp_width(shape: ModelShape) -> float:
    if not shape.experts:
        return shape.intermediate
    return shape.active_experts * (shape.expert_width + shape.hidden / 2) + shape.shared_width


def engine_weight_bytes(shape: ModelShape, layout: Layout, *, dtype_bytes: int = 2) -> float:
    """Return the bytes of weights on one GPU of an engine."""
    return shape.num_params * dtype_bytes / layout.tensor_parallel_size


def cache_bytes_per_token(shape: ModelShape, layout: Layout, *, dtype_bytes: int = 2) -> float:
    """Return the bytes of one cached token on one GPU of an engine; KV heads may be repeated."""
    kv_share = max(1, shape.kv_heads) / max(shape.kv_heads, layout.tensor_parallel_size)
    return shape.kv_elements * dtype_bytes / layout.tensor_parallel_size / kv_share


def layout_memory(
    shape: ModelShape,
    workload: Workload,
    layout: Layout,
    machine: Machine,
    *,
    max_concurrency: int = 256,
) -> GpuMemory:
    """Return the bytes of a trainer's and of an engine's GPU, which may be the same.

    The cache is as large as the completions of a step need, or as there is room.
    """
    size = machine.dtype_bytes
    trainer = trainer_memory(shape, workload, layout, dtype_bytes=size)
    running = min(max_concurrency, -(-workload.rows // layout.data_parallel_size))
    tokens = min(running * workload.longest, cache_room(shape, workload, layout, machine))
    cache = tokens * cache_bytes_per_token(shape, layout, dtype_bytes=size)
    shares = shared_weights(layout)
    weights = 0.0 if shares else engine_weight_bytes(shape, layout, dtype_bytes=size)
    return replace(trainer, engine_weights=weights, cache=cache, colocated=layout.colocated)


def cache_room(shape: ModelShape, workload: Workload, layout: Layout, machine: Machine) -> float:
    """Return the tokens that an engine can cache: what is left of its GPUs, at most 90 %."""
    held = engine_weight_bytes(shape, layout, dtype_bytes=machine.dtype_bytes)
    if layout.colocated:
        trainer = trainer_memory(shape, workload, layout, dtype_bytes=machine.dtype_bytes)
        held += trainer.weights + trainer.optimizer + trainer.reference
        if shared_weights(layout):
            held -= trainer.weights
    room = 0.9 * machine.memory_bytes - RESERVED_BYTES - held
    per_token = cache_bytes_per_token(shape, layout, dtype_bytes=machine.dtype_bytes)
    return max(0.0, room / per_token)


def shared_weights(layout: Layout) -> bool:
    """Return whether engine and trainer use the same tensors: one GPU, one process."""
    return layout.colocated and layout.trainer_gpus == layout.engine_gpus == 1
