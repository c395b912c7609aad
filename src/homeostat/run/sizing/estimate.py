"""Estimate the peak memory of each device before a run starts, and suggest how to lower it.

    held         weights, gradients, optimizer state, the reference model
    training     held + what the largest micro-batch needs (train/estimating runs it without data)
    sampling     held + the engine's KV cache + the engine's copies of the weights (on a CPU)
                 + one forward pass over prompts, or over one token of each sequence (RL with the
                 native engine)

If the engine sleeps, the two alternate; if it does not, its cache and copies stay allocated while
training. On a CPU the process itself (interpreter and libraries) is added, as measured in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from homeostat.algorithms.catalogue import policy_gradient
from homeostat.algorithms.policy import policy_spec
from homeostat.algorithms.row_loss import row_loss
from homeostat.config.algorithm import PolicyGradientConfig
from homeostat.config.kind import RunKind
from homeostat.config.loading.load import build_config
from homeostat.config.native import NativeEngineConfig
from homeostat.config.run import RunConfig
from homeostat.data.loader import micro_batches
from homeostat.data.prompts import PromptSet
from homeostat.errors import ConfigError
from homeostat.models.preview import ModelPreview
from homeostat.observe.devices import host_rss
from homeostat.rollout.native.cache import token_bytes
from homeostat.rollout.native.fast import decode_path
from homeostat.rollout.native.memory import free_bytes
from homeostat.train.estimating.estimate import UpdateMemory, estimate_prefill, estimate_update
from homeostat.train.runtime import Runtime
from homeostat.types import LossSpec, TokenRow, TrainBatch

# Bytes for each vocabulary entry of a sampled token: fp32 logits, their exponentials, float64 sums.
_DRAW_BYTES = 16


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """An upper estimate of the memory of one device, in bytes."""

    device: str
    capacity: int
    process: int
    update: UpdateMemory
    cache: int = 0
    copies: int = 0
    sampling: int = 0
    sleeps: bool = True
    # Free memory of the host, for what an update offloads to it.
    host_capacity: int = 0

    @property
    def training_peak(self) -> int:
        return self.process + self.update.peak + (0 if self.sleeps else self.cache + self.copies)

    @property
    def sampling_peak(self) -> int:
        engine = self.cache + self.copies + self.sampling
        return self.process + self.update.held + engine

    @property
    def peak(self) -> int:
        return max(self.training_peak, self.sampling_peak if self.cache else 0)

    @property
    def fits(self) -> bool:
        return self.peak <= self.capacity and self.update.host <= self.host_capacity

    def as_json(self) -> dict[str, Any]:
        parts = {name: getattr(self.update, name) for name in UpdateMemory.__slots__}
        return {
            "device": self.device,
            "capacity_bytes": self.capacity,
            "peak_bytes": self.peak,
            "training_peak_bytes": self.training_peak,
            "sampling_peak_bytes": self.sampling_peak if self.cache else 0,
            "fits": self.fits,
            "process_bytes": self.process,
            **{f"{name}_bytes": value for name, value in parts.items()},
            "cache_bytes": self.cache,
            "copies_bytes": self.copies,
            "sampling_bytes": self.sampling,
            "host_capacity_bytes": self.host_capacity,
        }


def plan_memory(
    config: RunConfig,
    runtime: Runtime,
    batch: TrainBatch,
    *,
    preview: ModelPreview,
    longest_prompt: int = 0,
) -> MemoryPlan:
    """Return the memory plan of a run. `batch` is its largest micro-batch."""
    device = runtime.device
    update = estimate_update(config.for_trainer, runtime, batch, loss_of(config, batch))
    process = int(host_rss()) if device.type == "cpu" else 0
    capacity = free_bytes(device) + process
    host = free_bytes(torch.device("cpu"))
    plan = MemoryPlan(str(device), capacity, process, update, host_capacity=host)
    if not config.is_rl or not config.engine.shares_weights:
        return plan
    if not isinstance(config.engine, NativeEngineConfig):
        # The memory that a user's engine takes is not known.
        return plan
    free = free_bytes(device)
    cache = cache_bytes(config, preview, free=free, longest_prompt=longest_prompt)
    running = min(config.engine.max_concurrency, config.requests_per_step)
    drawing = running * preview.vocab_size * _DRAW_BYTES
    tokens = min(config.engine.prefill_tokens, longest_prompt * config.rollout.prompts_per_step)
    prefill = estimate_prefill(config.for_trainer, runtime, num_tokens=tokens)
    return MemoryPlan(
        plan.device,
        capacity,
        process,
        update,
        cache=cache,
        copies=copies_bytes(config, runtime, preview),
        sampling=max(drawing, prefill),
        sleeps=config.engine.sleep,
        host_capacity=host,
    )


def loss_of(config: RunConfig, batch: TrainBatch) -> LossSpec:
    """Return a loss of the run's kind over a micro-batch, for an update without data."""
    algorithm = config.algorithm
    if not isinstance(algorithm, PolicyGradientConfig):
        loss = row_loss(algorithm, preference=config.preference, data=config.data)
        return loss.spec(batch.rows())
    kl = algorithm.kl
    return policy_spec(
        algorithm,
        denominator=1.0,
        temperature=config.rollout.temperature,
        kl_coefficient=kl.coefficient if kl is not None and kl.place == "loss" else None,
    )


def cache_bytes(config: RunConfig, preview: ModelPreview, *, free: int, longest_prompt: int) -> int:
    """Return the largest size of the KV cache.

    It is limited by the sequences that run at the same time, and by the engine's share of the
    `free` bytes.
    """
    per_token = preview.cache_bytes_per_token
    assert per_token is not None, "combinations asks for the native decoder"
    assert preview.decoder is not None, "combinations asks for the native decoder"
    if config.engine.kv_cache_dtype == "fp8":
        # In FP8 the size does not depend on the dtype that is computed in.
        per_token = token_bytes(preview.decoder, torch.float32, is_fp8=True)
    running = min(config.engine.max_concurrency, config.requests_per_step)
    wanted = per_token * (longest_prompt + config.rollout.max_new_tokens) * running
    return min(wanted, int(config.engine.memory_share * free))


def copies_bytes(config: RunConfig, runtime: Runtime, preview: ModelPreview) -> int:
    """Return the size of the weight copies that the engine makes: in FP8, or on a CPU.

    Those in FP8 are of all linear maps; skipped layers are counted, too.
    """
    assert preview.decoder is not None, "combinations asks for the native decoder"
    assert isinstance(config.engine, NativeEngineConfig), "what others take is not known"
    if config.engine_fp8 is not None:
        num_tables = 1 if preview.decoder.tie_embeddings else 2
        tables = num_tables * preview.decoder.vocab_size * preview.decoder.hidden_size
        # An emulation keeps them dequantised.
        each = 1 if runtime.device.type == "cuda" else 4
        return each * (preview.num_params - tables)
    place = {"numerics": config.model.numerics, "device": runtime.device}
    way = decode_path(preview.decoder, config.engine, **place)
    # Adapters are copied as they are, beside the weights.
    can_copy = config.model.quantization is None and runtime.dtype == torch.float32
    return 4 * preview.num_params if way in ("compact", "compiled") and can_copy else 0


def largest_rl_batch(config: RunConfig, prompts: PromptSet) -> TrainBatch:
    """Return the largest micro-batch of a step in which every completion has its full length."""
    if config.is_strided:
        # Rows of a text are packed by their distinct tokens, up to the budget.
        return full_batch(config, config.trainer.tokens_per_micro_batch)
    trained, rollout = config.rollout.max_new_tokens, config.rollout
    rows_per_update = -(-rollout.samples_per_step // config.trainer.updates_per_step)
    needed = -(-rows_per_update // rollout.samples_per_prompt)
    order = np.argsort(prompts.lengths)[::-1]
    rows: list[TokenRow] = []
    for number in range(needed):
        prompt_T = prompts[int(order[number % len(order)])].tokens_T
        tokens_T = np.concatenate([prompt_T, np.zeros(trained, dtype=np.int64)])
        weights_T = (np.arange(len(tokens_T)) >= len(prompt_T)).astype(np.float32)
        for _ in range(rollout.samples_per_prompt):
            rows.append(TokenRow(len(rows), tokens_T, weights_T, _columns(config, len(tokens_T))))
    rows = rows[:rows_per_update]
    batches = micro_batches(rows, config.trainer, num_data_groups=config.mesh.num_data_groups)
    return max(batches, key=lambda batch: batch.num_tokens)


def full_batch(config: RunConfig, tokens: int) -> TrainBatch:
    """Return a batch of `tokens` tokens in rows of the maximum length, all of them trained."""
    length = min(config.longest_row, tokens)
    tokens_T, weights_T = np.zeros(length, dtype=np.int64), np.ones(length, dtype=np.float32)
    columns, together = _columns(config, length), config.rows_per_example
    numbers = range(together * max(1, tokens // length // together))
    return TrainBatch.of([TokenRow(number, tokens_T, weights_T, columns) for number in numbers])


def _columns(config: RunConfig, length: int) -> dict[str, np.ndarray]:
    return {name: np.zeros(length, dtype=np.float32) for name in _column_names(config)}


def _column_names(config: RunConfig) -> list[str]:
    """Return the columns of numbers per token that the loss of the run reads."""
    if config.kind is RunKind.PREFERENCE:
        return ["label", *(["ref_logp"] if config.for_rows.preferring.needs_reference else [])]
    if config.kind is RunKind.REWARD_MODEL:
        return ["label"]
    if not config.is_rl:
        return []
    names = ["advantage", "engine_logp"]
    names += ["old_logp"] if config.trainer.updates_in_step > 1 else []
    return names + (["ref_logp"] if policy_gradient(config.algorithm).kl is not None else [])


def with_columns(config: RunConfig, batch: TrainBatch) -> TrainBatch:
    """Return the batch with the columns that the loss reads, where no model has filled them yet."""
    missing = [name for name in _column_names(config) if name not in batch.columns]
    empty = {name: np.zeros(batch.num_tokens, dtype=np.float32) for name in missing}
    return replace(batch, columns={**batch.columns, **empty})


def ladder(
    config: RunConfig,
    plan_of: Callable[[RunConfig], MemoryPlan],
    *,
    rungs: Iterable[str] | None = None,
) -> Iterator[tuple[list[str], MemoryPlan]]:
    """Yield settings that lower the peak, with the plan that they give.

    The least disruptive come first, and each adds to those before it. The last one yielded is the
    first that fits, if any does. `rungs` are the single settings to try; all, if none are given.
    """
    raw = config.model_dump(mode="json", exclude_unset=True)
    changes: list[str] = []
    lowest = plan_of(config).peak
    for rung in (*mild_rungs(config), *harsh_rungs(config)) if rungs is None else rungs:
        try:
            plan = plan_of(build_config(raw, [*changes, rung], file=None))
        except ConfigError:
            # A setting that this recipe does not accept is no advice for it.
            continue
        if plan.peak >= lowest:
            continue
        lowest = plan.peak
        # A key that was changed before gets the new value instead of the old one.
        changes = [text for text in changes if text.split("=")[0] != rung.split("=")[0]] + [rung]
        yield list(changes), plan
        if plan.fits:
            return


def mild_rungs(config: RunConfig) -> Iterator[str]:
    """Yield single settings that change neither the result nor, by much, the speed."""
    trainer = config.trainer
    tokens, ranks = trainer.tokens_per_device, trainer.backend.ranks_per_micro_batch
    while trainer.packing and tokens // 2 * ranks >= config.longest_example:
        tokens //= 2
        yield f"trainer.max_tokens_per_device={tokens}"
    if trainer.micro_batch_rows is not None and trainer.micro_batch_rows > 1:
        yield "trainer.micro_batch_rows=1"
    if trainer.logits_bytes("cpu") > 16 * 2**20:
        yield "trainer.logits_chunk_bytes=16MiB"
    if config.is_rl and not config.engine.sleep:
        yield "engine.sleep=true"
    if config.is_rl and config.engine.memory_share > 0.2:
        yield "engine.memory_share=0.2"
    if not trainer.gradient_checkpointing and config.model.implementation == "native":
        yield "trainer.gradient_checkpointing=selective"
    if trainer.gradient_checkpointing is not True:
        yield "trainer.gradient_checkpointing=true"


def harsh_rungs(config: RunConfig) -> Iterator[str]:
    """Yield single settings that are slower, and then those that change what is learnt."""
    trainer = config.trainer
    if trainer.device != "cpu":
        yield "trainer.backend.offload_optimizer=true"
        is_local = trainer.backend.type == "local"
        yield f"trainer.backend.offload_{'experts' if is_local else 'params'}=true"
    yield "trainer.optimizer.moments=8bit"
    if trainer.precision == "fp32" and trainer.device != "cpu":
        yield "trainer.precision=bf16"
    if config.lora is None:
        yield "lora.rank=16"
    yield f"data.max_length={max(2, config.data.max_length // 2)}"
