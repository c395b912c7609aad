"""Settings of the trainer: batch sizes, optimizer, schedule, precision, and handling of failures.

All sizes follow from one calculation (shown by `homeostat check`): an update is `batch_rows` rows;
packing puts them into micro-batches of at most `max_tokens_per_device` tokens for each of the ranks
that share one (`backend.ranks_per_micro_batch`, mostly 1), or, with packing off, of
`micro_batch_rows` rows. The loss is normalised over the whole update. In RL a step samples
`rollout.prompts_per_step` x `rollout.samples_per_prompt` rows and splits them into
`updates_per_step` updates.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import ByteSize, Settings, key
from homeostat.config.cluster import AnyBackend, LocalBackend
from homeostat.config.fp8 import Fp8Config
from homeostat.config.int4 import Int4Config
from homeostat.config.optimizer import AdamWConfig, AnyOptimizer

# Activations recomputed in the backward pass: none (false), norms and gates, or whole layers
# (true).
Checkpointing = bool | Literal["selective"]


class Schedule(Settings):
    """Base class of all schedules: a linear warm-up, then a decay over the rest of the run.

    Update k of n, counted from 1, with w updates of warm-up, uses this share of the peak:

        k <= w:  k / w                                     update 1 already moves, update w peaks
        k > w:   decay(p) with p = (k - w - 1) / (n - w)   p runs from 0 to 1 - 1 / (n - w)

    After the warm-up, update k gets the same rate as in the schedules of transformers, which count
    from 0. The first update after the warm-up has the peak rate, so a run without warm-up and a run
    of a single update reach the peak, too. The last update still learns: the decay would reach
    `min_lr_share` only with update n + 1. The warm-up of transformers begins at 0, which would
    waste the first update.
    """

    warmup_steps: int | None = key(
        None,
        ge=0,
        resume="warn",
        help="Length of the warm-up in optimizer updates. Set this or warmup_share, not both.",
    )
    warmup_share: float = key(
        0.03, ge=0, lt=1, resume="warn", help="Length of the warm-up as a share of all updates."
    )

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return the length of the warm-up in updates."""
        if self.warmup_steps is not None:
            return min(self.warmup_steps, total_steps)
        return math.ceil(self.warmup_share * total_steps)

    def factor(self, step: int, total_steps: int) -> float:
        """Return the share of the peak learning rate that update `step` (counted from 1) uses."""
        assert 1 <= step <= total_steps, (step, total_steps)
        warmup = self.num_warmup_steps(total_steps)
        if step <= warmup:
            return step / warmup
        return self.after_warmup((step - warmup - 1) / (total_steps - warmup))

    def after_warmup(self, progress: float) -> float:
        """Return the share of the peak at `progress`, which runs from 0 to just under 1."""
        raise NotImplementedError


class ConstantSchedule(Schedule):
    """Keep the peak learning rate after the warm-up."""

    type: Literal["constant"]

    def after_warmup(self, progress: float) -> float:
        return 1.0


class LinearSchedule(Schedule):
    """Decay the learning rate linearly from the peak to `min_lr_share` of it."""

    type: Literal["linear"]
    min_lr_share: float = key(
        0.0, ge=0, le=1, resume="warn", help="Share of the peak at which the decay ends."
    )

    def after_warmup(self, progress: float) -> float:
        return self.min_lr_share + (1 - self.min_lr_share) * (1 - progress)


class CosineSchedule(Schedule):
    """Decay the learning rate along half a cosine from the peak to `min_lr_share` of it."""

    type: Literal["cosine"] = "cosine"
    min_lr_share: float = key(
        0.1, ge=0, le=1, resume="warn", help="Share of the peak at which the decay ends."
    )

    def after_warmup(self, progress: float) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_lr_share + (1 - self.min_lr_share) * cosine


class WsdSchedule(Schedule):
    """Warm-up, stable, decay: a constant rate, then a linear decay over the last `decay_share`."""

    type: Literal["wsd"]
    decay_share: float = key(
        0.2,
        gt=0,
        le=1,
        resume="warn",
        help="Share of the steps after the warm-up during which the rate decays.",
    )
    min_lr_share: float = key(
        0.0, ge=0, le=1, resume="warn", help="Share of the peak at which the decay ends."
    )

    def after_warmup(self, progress: float) -> float:
        left = min(1.0, (1 - progress) / self.decay_share)
        return self.min_lr_share + (1 - self.min_lr_share) * left


AnySchedule = Annotated[
    ConstantSchedule | LinearSchedule | CosineSchedule | WsdSchedule, Field(discriminator="type")
]


# Token budget of a micro-batch if neither the recipe nor the run's own choice sets one.
DEFAULT_TOKENS = 8192


class TrainerConfig(Settings):
    """Settings of training: batch sizes, optimizer, schedule, precision and failure handling."""

    backend: AnyBackend = key(
        LocalBackend(),
        resume="free",
        help="How the model is distributed over the ranks of `cluster`.",
    )
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", resume="warn", help="Device to train on. auto: a GPU if there is one."
    )
    threads: int | None = key(
        None,
        ge=1,
        le=1024,
        resume="warn",
        help="CPU threads that one torch operation uses. Default: one thread or all cores, "
        "whichever is faster in a measurement at start-up. The measurement includes lanes.",
    )
    lanes: int | None = key(
        None,
        ge=1,
        le=64,
        resume="warn",
        help="Number of parts of a micro-batch that are computed in parallel on a CPU, each with "
        "its own threads. Default: 1 if `threads` is set, otherwise the fastest number in a "
        "measurement at start-up.",
    )
    epochs: int | None = key(
        None,
        ge=1,
        resume="warn",
        help="Number of passes over the data. Set this or max_steps (default: 1 epoch).",
    )
    max_steps: int | None = key(
        None,
        ge=1,
        resume="warn",
        help="Number of steps to train. A step is one optimizer update; in RL, one round of "
        "sampling and updating.",
    )
    batch_rows: int = key(32, ge=1, help="Number of rows in one optimizer update.")
    updates_per_step: int = key(
        1, ge=1, help="Number of optimizer updates into which the samples of a step are split (RL)."
    )
    epochs_per_step: int = key(
        1,
        ge=1,
        help="Number of passes over the samples of a step (RL). Each pass shuffles the groups and "
        "makes updates_per_step updates. Ratios are relative to the policy before the first "
        "update.",
    )
    packing: bool = key(True, help="Fill each micro-batch with rows up to max_tokens_per_device.")
    max_tokens_per_device: int | None = key(
        None,
        ge=2,
        resume="warn",
        help="Largest number of tokens that one rank computes at a time (packing on). If ranks "
        "share a micro-batch (context_parallel_size, sequence_parallel_size), this is the number "
        "for each of them. Default: 8192; on a GPU up to 32768 if memory allows, which is decided "
        "at start-up and kept when the run is resumed. A longer row forms a micro-batch by itself.",
    )
    micro_batch_rows: int | None = key(
        None, ge=1, resume="warn", help="Number of rows in a micro-batch (packing off; default 1)."
    )
    share_prompts: bool = key(
        True,
        resume="warn",
        help="If several rows of a micro-batch begin with the same prompt, compute it once "
        "(native decoder, no dropout). The result is the same up to rounding. Not used with "
        "trainer.backend.context_parallel_size above 1, which needs whole rows.",
    )
    lr: float | None = key(
        None,
        ge=0,
        resume="warn",
        help="Peak learning rate. The default depends on the method: SFT 2e-5, RL 1e-6; ten "
        "times as much for an adapter (lora).",
    )
    optimizer: AnyOptimizer = key(AdamWConfig(), help="The optimizer: adamw, muon or adafactor.")
    schedule: AnySchedule = key(
        CosineSchedule(), resume="warn", help="How the learning rate changes over the run."
    )
    max_grad_norm: float | None = key(
        1.0,
        gt=0,
        resume="warn",
        help="Largest gradient norm; larger gradients are scaled down to it. null: no limit.",
    )
    precision: Literal["auto", "fp32", "bf16"] = key(
        "auto",
        help="bf16: bf16 weights and compute, with fp32 master weights, gradients and moments. "
        "auto: bf16 on a GPU, fp32 on a CPU.",
    )
    fp8: Fp8Config | None = key(
        None,
        help="Compute linear layers in FP8; the weights themselves stay in the dtype of "
        "`precision`. On a CPU, FP8 is emulated: the numbers are the same, but it is slower than "
        "without FP8.",
        resume="warn",
    )
    int4: Int4Config | None = key(
        None,
        help="Quantisation-aware training: compute with weights rounded to INT4 in groups, so "
        "that nothing is lost when the model is exported in INT4. The weights themselves stay in "
        "the dtype of `precision`, and gradients pass the rounding unchanged. Default: null, "
        "unless the environment variable OPEN_TRAINING_INT4_FAKE_QAT_FLAG sets it.",
    )
    gradient_checkpointing: Checkpointing = key(
        False,
        resume="free",
        help="Recompute activations in the backward pass: less memory, same result. true: "
        "recompute all of them, which is about a third slower. selective: recompute only norms "
        "and gates (native decoder), which saves a third of the memory and costs a few percent of "
        "the time.",
    )
    logits_chunk_bytes: ByteSize | None = key(
        None,
        ge=2**16,
        resume="warn",
        help="Largest amount of memory that logits may use at one time. Default: 64 MiB on a CPU; "
        "512 MiB on a GPU, where small matrix products are slower.",
    )
    pin_memory: bool | None = key(
        None,
        resume="free",
        help="Use page-locked host memory for batches. Default: only if training on a GPU.",
    )
    empty_cache_interval: int = key(
        0, ge=0, resume="free", help="Release cached GPU memory every N steps; 0: never."
    )
    on_nonfinite: Literal["skip", "halt"] = key(
        "skip",
        resume="free",
        help="Reaction to a loss or gradient that is not finite: skip the update or halt the run. "
        "Such an update is never applied.",
    )
    max_nonfinite_steps: int = key(
        3,
        ge=1,
        resume="free",
        help="Number of consecutive skipped updates after which the run halts; a step of RL has "
        "several with updates_per_step or epochs_per_step. The limit is ten times as high if only "
        "single rows cause it.",
    )
    on_oom: Literal["halve", "halt"] = key(
        "halve",
        resume="free",
        help="Reaction to running out of memory. halve: retry the step with half as many tokens "
        "per micro-batch; the gradient is unchanged. halt: end the run. With several ranks (fsdp) "
        "the run always halts.",
    )

    def steps_per_epoch(self, num_rows: int, *, rows_per_step: int | None = None) -> int:
        """Return the number of steps in an epoch.

        `rows_per_step` is batch_rows by default; in RL it is the number of prompts in a step.
        """
        return math.ceil(num_rows / (rows_per_step or self.batch_rows))

    def total_steps(self, num_rows: int, *, rows_per_step: int | None = None) -> int:
        """Return the length of the run in steps: max_steps, or epochs times their length."""
        if self.max_steps is not None:
            return self.max_steps
        return self.steps_per_epoch(num_rows, rows_per_step=rows_per_step) * (self.epochs or 1)

    def learning_rate(self, step: int, total_steps: int) -> float:
        """Return the learning rate of update `step`, counted from 1."""
        return self.peak_lr * self.schedule.factor(step, total_steps)

    @property
    def updates_in_step(self) -> int:
        """Return the number of optimizer updates that a step of RL has."""
        return self.updates_per_step * self.epochs_per_step

    @property
    def peak_lr(self) -> float:
        """Return the peak learning rate, which config/loading/defaults.py chose."""
        assert self.lr is not None, "chosen at load"
        return self.lr

    def logits_bytes(self, device_type: str) -> int:
        """Return the memory budget for logits on a device of this type."""
        return self.logits_chunk_bytes or (512 if device_type == "cuda" else 64) * 2**20

    @property
    def tokens_per_micro_batch(self) -> int:
        """Return the token budget of a micro-batch: that of all ranks that share it."""
        return self.tokens_per_device * self.backend.ranks_per_micro_batch

    @property
    def tokens_per_device(self) -> int:
        """Return the token budget of one rank, or its default."""
        return self.max_tokens_per_device or DEFAULT_TOKENS

    @property
    def budget_text(self) -> str:
        """Return the token budget of a micro-batch for a message, with the ranks that share it."""
        each, ranks = self.tokens_per_device, self.backend.ranks_per_micro_batch
        return f"{each} tokens" if ranks == 1 else f"{each} tokens on each of {ranks} ranks"

    @property
    def shares_prompts(self) -> bool:
        """Return whether a prompt of several rows is computed once: not in a ring, which has whole
        rows."""
        return self.share_prompts and self.backend.context_parallel_size == 1

    def rows_per_micro_batch(self) -> int:
        """Return the number of rows in a micro-batch if packing is off."""
        return self.micro_batch_rows or 1
