"""Estimates the peak memory of an update by running it without data.

    held throughout   weights, the optimizer's masters, gradients and moments; a reference, a critic
    on top, at most   what one micro-batch keeps between forward and backward, its logits, and the
                      gradients that are made on the way

The update runs on the meta device through the same forward pass, loss and checkpointing as the real
one, and every tensor that is alive is counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from homeostat.algorithms.value import value_spec
from homeostat.config.cluster import FsdpBackend
from homeostat.config.optimizer import AnyOptimizer
from homeostat.config.parts import TrainerSetup
from homeostat.config.rollout import AdapterOffReference, InitialReference
from homeostat.models.layer_offload import layer_matrices
from homeostat.models.shape_only import ShapeDecoder, shape_decoder
from homeostat.models.weight_stream import slot_bytes
from homeostat.ops import kernels
from homeostat.ops.attention import PackedLayout, resolve_kernel
from homeostat.ops.live_bytes import LiveBytes
from homeostat.precision.bases import base_rewrite
from homeostat.precision.shape_only import rewrite_shape
from homeostat.train.build import copies_features, critic_lora
from homeostat.train.estimating.optimizer_memory import optimizer_bytes
from homeostat.train.estimating.rank_memory import rank_bytes
from homeostat.train.forward import Forward
from homeostat.train.precision import copy_bytes
from homeostat.train.runtime import Runtime
from homeostat.train.sequence.memory import exchanged_bytes, share_of
from homeostat.types import LossSpec, TrainBatch


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Bytes of one device."""

    weights: int
    optimizer: int
    gradients: int
    reference: int
    work: int
    # The critic's weights, optimizer and gradients.
    critic: int = 0
    # For each part of a micro-batch that is computed at the same time (train/lanes.py).
    lanes: int = 0
    # Host memory of offloaded data, for all ranks on the host together: the optimizer's state and
    # masters; or experts or all weights, with their gradients and state.
    host: int = 0

    @property
    def held(self) -> int:
        policy = self.weights + self.optimizer + self.gradients
        return policy + self.reference + self.critic

    @property
    def peak(self) -> int:
        return self.held + self.work + self.lanes


@dataclass(frozen=True, slots=True)
class _Trained:
    """Bytes of one trained model on one rank, and the memory that a micro-batch of it needs."""

    weights: int
    optimizer: int
    gradients: int
    work: int
    num_trained: int
    host: int

    @property
    def held(self) -> int:
        return self.weights + self.optimizer + self.gradients


def estimate_update(
    config: TrainerSetup, runtime: Runtime, batch: TrainBatch, loss: LossSpec
) -> UpdateMemory:
    """Estimate the memory of an update by `loss` whose largest micro-batch is `batch`, on one rank.

    Ranks that share a micro-batch hold a part of it each.
    """
    batch = share_of(batch, config.trainer.backend.ranks_per_micro_batch)
    how = {
        "dtype": runtime.dtype,
        "kernel": _kernel(config, runtime),
        "gradient_checkpointing": config.trainer.gradient_checkpointing,
    }
    has_head = config.head is not None
    hold = base_rewrite(config.model)
    shape = shape_decoder(config.model, config.lora, has_value_head=has_head, hold=hold, **how)
    how_trained = {"optimizer": config.trainer.optimizer}
    policy = _trained(config, runtime, shape, batch, loss, **how_trained)
    critic = None
    if config.critic is not None:
        start, lora = config.critic.start(config.model), critic_lora(config.critic, config.lora)
        model = shape_decoder(start, lora, has_value_head=True, hold=hold, **how)
        spec = value_spec(denominator=1.0, clip=config.critic.clip)
        how_trained = {"optimizer": config.critic.optimizer}
        critic = _trained(config, runtime, model, _value_batch(batch), spec, **how_trained)
    shards, slots = config.mesh.num_shards, _slot_bytes(config, shape)
    here, offloaded = _placed(config, shape)
    away = policy.host + (0 if critic is None else critic.host)
    return UpdateMemory(
        weights=policy.weights,
        optimizer=policy.optimizer,
        gradients=policy.gradients,
        reference=_reference_bytes(config, here, slots=slots) // shards,
        critic=0 if critic is None else critic.held,
        work=max(policy.work, 0 if critic is None else critic.work)
        + exchanged_bytes(
            shape.config,
            config.mesh,
            num_tokens=batch.num_tokens,
            item_bytes=runtime.dtype.itemsize,
        ),
        lanes=runtime.lanes * policy.num_trained * 4 if runtime.lanes > 1 else 0,
        host=(away + _reference_bytes(config, offloaded) // shards) * config.cluster.ranks_per_host,
    )


def _trained(
    config: TrainerSetup,
    runtime: Runtime,
    shape: ShapeDecoder,
    batch: TrainBatch,
    spec: LossSpec,
    *,
    optimizer: AnyOptimizer,
) -> _Trained:
    """Moments, and below fp32 the masters and the gradients that are summed for them."""
    if isinstance(config.trainer.backend, FsdpBackend):
        return _trained_on_ranks(config, runtime, shape, batch, spec, optimizer=optimizer)
    here, offloaded = _placed(config, shape)
    is_low = runtime.dtype != torch.float32
    # Those of fp32 parameters stay where autograd leaves them, unless that is host memory.
    freed = {p for p in shape.parameters() if is_low or p in offloaded}
    num_trained = sum(p.numel() for p in here if p.requires_grad)
    copies = copy_bytes(config.trainer, runtime, shape)
    state = optimizer_bytes(optimizer, shape.named_parameters(), config.trainer, offloaded)
    num_away = sum(p.numel() for p in offloaded if p.requires_grad)
    return _Trained(
        weights=_num_bytes(here) + _slot_bytes(config, shape) + copies,
        optimizer=state.device,
        gradients=num_trained * 4 if is_low else 0,
        work=max(_work(config, runtime, shape, batch, spec, freed=freed), state.work),
        num_trained=num_trained,
        host=_num_bytes(offloaded) + num_away * 4 + state.host,
    )


def _trained_on_ranks(
    config: TrainerSetup,
    runtime: Runtime,
    shape: ShapeDecoder,
    batch: TrainBatch,
    spec: LossSpec,
    *,
    optimizer: AnyOptimizer,
) -> _Trained:
    """Estimate one rank's share, and the layers that it gathers."""
    backend = config.trainer.backend
    assert isinstance(backend, FsdpBackend), backend
    # If the optimizer is in host memory, only its buffers are on the device.
    state = optimizer_bytes(optimizer, shape.named_parameters(), config.trainer, ())
    held = rank_bytes(shape, backend, config.mesh, buffers=state.device)
    # A layer's gradients are distributed to the ranks as soon as they are computed.
    freed = set(shape.parameters())
    return _Trained(
        weights=held.weights,
        optimizer=held.moments,
        gradients=held.gradients,
        work=max(_work(config, runtime, shape, batch, spec, freed=freed), state.work),
        num_trained=held.num_trained,
        host=held.host,
    )


def _value_batch(batch: TrainBatch) -> TrainBatch:
    """The batch with the columns that a critic's loss reads."""
    empty_N = np.zeros(batch.num_tokens, dtype=np.float32)
    return replace(batch, columns={"value": empty_N, "return": empty_N})


def _placed(config: TrainerSetup, shape: ShapeDecoder) -> tuple[list[Tensor], set[Tensor]]:
    """Return the parameters on the device, and those that stay in host memory."""
    away = {p for layer in _streamed(config, shape) for p in layer}
    return [p for p in shape.parameters() if p not in away], away


def _slot_bytes(config: TrainerSetup, shape: ShapeDecoder) -> int:
    """Return the bytes of the device's slots for weights in host memory."""
    if config.trainer.backend.type == "fsdp":
        return 0
    return slot_bytes(_streamed(config, shape))


def _streamed(config: TrainerSetup, shape: ShapeDecoder) -> list[list[Tensor]]:
    """Return the parameters that are in host memory, by the layers that are streamed."""
    on_host = config.trainer.backend.on_host
    if on_host == "layers" and config.trainer.backend.type == "fsdp":
        # Ranks gather their layers in other memory (train/estimating/rank_memory.py).
        return [list(shape.parameters())]
    if on_host == "layers":
        return [[found[2] for found in layer_matrices(layer)] for layer in shape.layers]
    blocks = shape.moe_blocks if on_host == "experts" else []
    return [list(block.experts.parameters()) for block in blocks]


def _num_bytes(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _reference_bytes(config: TrainerSetup, parameters: Iterable[Tensor], *, slots: int = 0) -> int:
    """Bytes of those parameters of the reference, and of the model of features, that they do not
    share with the policy, and of their slots, over all ranks."""
    choice, parameters = config.used_reference, list(parameters)
    # In one process a copy of the policy shares what is frozen; ranks load the files again.
    is_local = config.trainer.backend.type == "local"
    copied = _num_bytes(p for p in parameters if p.requires_grad or not is_local) + slots
    features = copied if copies_features(config) else 0
    if choice is None or isinstance(choice, AdapterOffReference) or config.precomputes_reference:
        return features
    if isinstance(choice, InitialReference):
        return features + copied
    return features + _num_bytes(parameters) + slots


def estimate_prefill(config: TrainerSetup, runtime: Runtime, *, num_tokens: int) -> int:
    """Bytes that a pass over so many prompt tokens needs, without gradients."""
    kernel = _kernel(config, runtime)
    how = {"dtype": runtime.dtype, "kernel": kernel, "gradient_checkpointing": False}
    shape = shape_decoder(config.model, config.lora, hold=base_rewrite(config.model), **how)
    nowhere = torch.device("meta")
    tokens_N = torch.zeros(num_tokens, dtype=torch.int64, device=nowhere)
    with kernels.meta_as(runtime.device), LiveBytes() as live, torch.no_grad():
        shape.hidden(tokens_N, tokens_N, PackedLayout.of([num_tokens], nowhere))
    return live.peak


def _work(
    config: TrainerSetup,
    runtime: Runtime,
    shape: ShapeDecoder,
    batch: TrainBatch,
    spec: LossSpec,
    *,
    freed: Collection[Tensor],
) -> int:
    """Estimate two micro-batches: gradients of the first are in memory while the second is
    computed, except for those of `freed` parameters."""
    nowhere = replace(runtime, device=torch.device("meta"), pin_memory=False)
    logits_bytes = config.trainer.logits_bytes(runtime.device.type)
    trainer = config.trainer.model_copy(update={"logits_chunk_bytes": logits_bytes})
    if trainer.fp8 is not None:
        rewrite_shape(shape, trainer.fp8, device=runtime.device)
    forward = Forward.of(shape, trainer, runtime=nowhere, seed=0)
    for parameter in freed:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    with kernels.meta_as(runtime.device), LiveBytes() as live:
        for _ in range(2):
            terms = forward.loss(shape, batch, spec, step=1)[1]
            terms.loss.backward()
    return live.peak


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _kernel(config: TrainerSetup, runtime: Runtime) -> str:
    how = {"dtype": runtime.dtype, "kernel": "sdpa", "gradient_checkpointing": False}
    shape = shape_decoder(config.model, None, hold=base_rewrite(config.model), **how).config
    return resolve_kernel(
        config.model.attention,
        device_type=runtime.device.type,
        dtype=runtime.dtype,
        head_dim=shape.head_dim,
        has_soft_cap=shape.block.attention_cap is not None,
    )
