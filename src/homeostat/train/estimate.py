"""Estimates what an update will hold at most, by doing it without data.

    held throughout   weights, the optimizer's masters, gradients and moments; a reference, a critic
    on top, at most   what one micro-batch keeps between forward and backward, its logits, and the
                      gradients that are made on the way

The update runs on the meta device through the same forward pass, loss and checkpointing as the
real one, and every tensor that is alive is counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from homeostat.algorithms.policy import policy_spec
from homeostat.algorithms.row_loss import row_loss
from homeostat.algorithms.value import value_spec
from homeostat.config.algorithm import PolicyGradientConfig
from homeostat.config.rollout import AdapterOffReference, InitialReference
from homeostat.config.run import RunConfig
from homeostat.models.expert_offload import NUM_SLOTS
from homeostat.models.shape_only import ShapeDecoder, shape_decoder
from homeostat.ops import kernels
from homeostat.ops.attention import PackedLayout, resolve_kernel
from homeostat.ops.live_bytes import LiveBytes
from homeostat.precision.shape_only import rewrite_shape
from homeostat.train.build import copies_features, critic_lora, head_of, reference_of
from homeostat.train.forward import Forward
from homeostat.train.precision import copy_bytes
from homeostat.train.runtime import Runtime
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
    # Of each part of a micro-batch that is computed at one time (train/lanes.py).
    lanes: int = 0
    # Experts that are offloaded to host memory, with their gradients and optimizer state.
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
    """Bytes of one trained model, over all ranks, and the work of a micro-batch of it."""

    weights: int
    optimizer: int
    gradients: int
    work: int
    num_trained: int
    host: int

    @property
    def held(self) -> int:
        return self.weights + self.optimizer + self.gradients


def estimate_update(config: RunConfig, runtime: Runtime, batch: TrainBatch) -> UpdateMemory:
    """For an update whose largest micro-batch is `batch`, on one of the ranks."""
    how = {
        "dtype": runtime.dtype,
        "kernel": _kernel(config, runtime),
        "gradient_checkpointing": config.trainer.gradient_checkpointing,
    }
    has_head = head_of(config) is not None
    shape = shape_decoder(config.model, config.lora, has_value_head=has_head, **how)
    policy = _trained(config, runtime, shape, batch, _loss_spec(config, batch))
    critic = None
    if config.critic is not None:
        start, lora = config.critic.start(config.model), critic_lora(config, config.critic)
        model = shape_decoder(start, lora, has_value_head=True, **how)
        spec = value_spec(denominator=1.0, clip=config.critic.clip)
        critic = _trained(config, runtime, model, _value_batch(batch), spec)
    shards, slots = config.mesh.num_shards, _slot_bytes(config, shape)
    here, offloaded = _placed(config, shape)
    return UpdateMemory(
        weights=policy.weights // shards,
        optimizer=policy.optimizer // shards,
        gradients=policy.gradients // shards,
        reference=_reference_bytes(config, here, slots=slots) // shards,
        critic=0 if critic is None else critic.held // shards,
        work=max(policy.work, 0 if critic is None else critic.work),
        lanes=runtime.lanes * policy.num_trained * 4 if runtime.lanes > 1 else 0,
        host=policy.host
        + (0 if critic is None else critic.host)
        + _reference_bytes(config, offloaded),
    )


def _trained(
    config: RunConfig, runtime: Runtime, shape: ShapeDecoder, batch: TrainBatch, spec: LossSpec
) -> _Trained:
    """Moments, and below fp32 the masters and the gradients that are summed for them."""
    here, offloaded = _placed(config, shape)
    has_masters = runtime.dtype != torch.float32
    # Those of fp32 parameters stay where autograd leaves them, unless that is host memory.
    freed = {p for p in shape.parameters() if has_masters or p in offloaded}
    num_trained = sum(p.numel() for p in here if p.requires_grad)
    return _Trained(
        weights=_num_bytes(here) + _slot_bytes(config, shape) + copy_bytes(config, runtime, shape),
        optimizer=num_trained * (12 if has_masters else 8),
        gradients=num_trained * 4 if has_masters else 0,
        work=_work(config, runtime, shape, batch, spec, freed=freed),
        num_trained=num_trained,
        host=_host_bytes(offloaded, has_masters=has_masters),
    )


def _value_batch(batch: TrainBatch) -> TrainBatch:
    """The batch with the columns that a critic's loss reads."""
    empty_N = np.zeros(batch.num_tokens, dtype=np.float32)
    return replace(batch, columns={"value": empty_N, "return": empty_N})


def _placed(config: RunConfig, shape: ShapeDecoder) -> tuple[list[Tensor], set[Tensor]]:
    """Return the parameters on the device, and those that stay in host memory."""
    if not config.trainer.backend.offload_experts:
        return list(shape.parameters()), set()
    away: set[Tensor] = {p for block in shape.moe_blocks for p in block.experts.parameters()}
    return [p for p in shape.parameters() if p not in away], away


def _slot_bytes(config: RunConfig, shape: ShapeDecoder) -> int:
    """Return the bytes of the device's slots for offloaded experts."""
    if not config.trainer.backend.offload_experts:
        return 0
    blocks = shape.moe_blocks[:NUM_SLOTS]
    return sum(_num_bytes(block.experts.parameters()) for block in blocks)


def _host_bytes(offloaded: Collection[Tensor], *, has_masters: bool) -> int:
    """Return the bytes of host memory: weights, summed gradients, moments, masters below fp32."""
    trained = sum(p.numel() for p in offloaded if p.requires_grad)
    return _num_bytes(offloaded) + trained * (16 if has_masters else 12)


def _num_bytes(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _reference_bytes(config: RunConfig, parameters: Iterable[Tensor], *, slots: int = 0) -> int:
    """Bytes of those parameters of the reference, and of the model of features, that they do not
    share with the policy, and of their slots, over all ranks."""
    choice, parameters = reference_of(config), list(parameters)
    # In one process a copy of the policy shares what is frozen; ranks load the files again.
    is_local = config.trainer.backend.type == "local"
    copied = _num_bytes(p for p in parameters if p.requires_grad or not is_local) + slots
    features = copied if copies_features(config) else 0
    if choice is None or isinstance(choice, AdapterOffReference) or config.precomputes_reference:
        return features
    if isinstance(choice, InitialReference):
        return features + copied
    return features + _num_bytes(parameters) + slots


def estimate_prefill(config: RunConfig, runtime: Runtime, *, num_tokens: int) -> int:
    """Bytes that a pass over so many prompt tokens needs, without gradients."""
    kernel = _kernel(config, runtime)
    shape = shape_decoder(
        config.model, config.lora, dtype=runtime.dtype, kernel=kernel, gradient_checkpointing=False
    )
    nowhere = torch.device("meta")
    tokens_N = torch.zeros(num_tokens, dtype=torch.int64, device=nowhere)
    with kernels.meta_as(runtime.device), LiveBytes() as live, torch.no_grad():
        shape.hidden(tokens_N, tokens_N, PackedLayout.of([num_tokens], nowhere))
    return live.peak


def _work(
    config: RunConfig,
    runtime: Runtime,
    shape: ShapeDecoder,
    batch: TrainBatch,
    spec: LossSpec,
    *,
    freed: Collection[Tensor],
) -> int:
    """Two micro-batches: gradients of the first are there while the second is computed, except for
    those of `freed` parameters."""
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


def _kernel(config: RunConfig, runtime: Runtime) -> str:
    shape = shape_decoder(
        config.model, None, dtype=runtime.dtype, kernel="sdpa", gradient_checkpointing=False
    ).config
    return resolve_kernel(
        config.model.attention,
        device_type=runtime.device.type,
        dtype=runtime.dtype,
        head_dim=shape.head_dim,
    )


def _loss_spec(config: RunConfig, batch: TrainBatch) -> LossSpec:
    algorithm = config.algorithm
    if not isinstance(algorithm, PolicyGradientConfig):
        return row_loss(config).spec(batch.rows())
    kl = algorithm.kl
    return policy_spec(
        algorithm,
        denominator=1.0,
        temperature=config.rollout.temperature,
        kl_coefficient=kl.coefficient if kl is not None and kl.place == "loss" else None,
    )
