"""How the weights are updated: sizes, optimizer, schedule, precision, and what to do in trouble.

One arithmetic for sizes (shown by `homeostat check`): an update is `batch_rows` rows; packing lays
them into micro-batches of at most `max_tokens_per_device` tokens, or, with packing off, of
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

# What is recomputed in the backward pass: nothing, norms and gates, or whole layers.
Checkpointing = bool | Literal["selective"]


class AdamWConfig(Settings):
    """AdamW with decoupled weight decay. Biases and norm weights are never decayed."""

    type: Literal["adamw"] = "adamw"
    beta1: float = key(0.9, ge=0, lt=1, help="Decay of the gradient's running mean.")
    beta2: float = key(0.999, ge=0, lt=1, help="Decay of the squared gradient's running mean.")
    eps: float = key(1e-8, gt=0, help="Added to the denominator.")
    weight_decay: float | None = key(
        None,
        ge=0,
        help="Applied to matrices only. Default: 0.01; 0 on an adapter (lora), whose decay would "
        "pull the model back to where it began.",
    )

    @property
    def decay(self) -> float:
        """The weight decay, which is chosen when a recipe is loaded (config/defaults.py)."""
        assert self.weight_decay is not None, "chosen at load"
        return self.weight_decay


class Schedule(Settings):
    """What all schedules share: a linear warm-up, then a decay over the rest of the run.

    Update k of n, counted from 1, with w updates of warm-up, uses this share of the peak:

        k <= w:  k / w                                     the first update moves, update w peaks
        k > w:   decay(p) with p = (k - w - 1) / (n - w)   p runs from 0 to 1 - 1 / (n - w)

    After the warm-up this is what transformers' schedules give update k: they count from 0. The
    first update after the warm-up has the peak, so that a run without warm-up and one of a single
    update have it, too, and the last update still learns: the decay heads for `min_lr_share` and
    would reach it with update n + 1. In the warm-up transformers begins at 0, which would spend the
    first update on nothing.
    """

    warmup_steps: int | None = key(
        None,
        ge=0,
        resume="warn",
        help="Warm-up in optimizer updates. Set this or warmup_share, not both.",
    )
    warmup_share: float = key(
        0.03, ge=0, lt=1, resume="warn", help="Warm-up as a share of all updates."
    )

    def num_warmup_steps(self, total_steps: int) -> int:
        if self.warmup_steps is not None:
            return min(self.warmup_steps, total_steps)
        return math.ceil(self.warmup_share * total_steps)

    def factor(self, step: int, total_steps: int) -> float:
        """Share of the peak learning rate that update `step` (counted from 1) uses."""
        assert 1 <= step <= total_steps, (step, total_steps)
        warmup = self.num_warmup_steps(total_steps)
        if step <= warmup:
            return step / warmup
        return self.after_warmup((step - warmup - 1) / (total_steps - warmup))

    def after_warmup(self, progress: float) -> float:
        """Share of the peak at `progress`, from 0 after the warm-up to just under 1 at the end."""
        raise NotImplementedError


class ConstantSchedule(Schedule):
    type: Literal["constant"]

    def after_warmup(self, progress: float) -> float:
        return 1.0


class LinearSchedule(Schedule):
    type: Literal["linear"]
    min_lr_share: float = key(
        0.0, ge=0, le=1, resume="warn", help="Share of the peak that the decay ends at."
    )

    def after_warmup(self, progress: float) -> float:
        return self.min_lr_share + (1 - self.min_lr_share) * (1 - progress)


class CosineSchedule(Schedule):
    type: Literal["cosine"] = "cosine"
    min_lr_share: float = key(
        0.1, ge=0, le=1, resume="warn", help="Share of the peak that the decay ends at."
    )

    def after_warmup(self, progress: float) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_lr_share + (1 - self.min_lr_share) * cosine


class WsdSchedule(Schedule):
    """Warm-up, stable, decay: constant, then linear down over the last `decay_share`."""

    type: Literal["wsd"]
    decay_share: float = key(
        0.2, gt=0, le=1, resume="warn", help="Share of the steps after warm-up that decay."
    )
    min_lr_share: float = key(
        0.0, ge=0, le=1, resume="warn", help="Share of the peak that the decay ends at."
    )

    def after_warmup(self, progress: float) -> float:
        left = min(1.0, (1 - progress) / self.decay_share)
        return self.min_lr_share + (1 - self.min_lr_share) * left


AnySchedule = Annotated[
    ConstantSchedule | LinearSchedule | CosineSchedule | WsdSchedule, Field(discriminator="type")
]


# Of a micro-batch, where neither the recipe nor the run (run/sizing/token_budget.py) says.
DEFAULT_TOKENS = 8192


class TrainerConfig(Settings):
    backend: AnyBackend = key(
        LocalBackend(), resume="free", help="How the model lies on the ranks of `cluster`."
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", resume="warn", help="Where to train.")
    threads: int | None = key(
        None,
        ge=1,
        le=1024,
        resume="warn",
        help="CPU threads of one operation of torch. Default: one or all cores, whichever is "
        "measured to be faster at start, also against lanes.",
    )
    lanes: int | None = key(
        None,
        ge=1,
        le=64,
        resume="warn",
        help="Parts of a micro-batch computed at one time on a CPU, each by threads of its own. "
        "Default: 1 where `threads` is set, else as measured at start.",
    )
    epochs: int | None = key(
        None, ge=1, resume="warn", help="Passes over the data. Set this or max_steps (default 1)."
    )
    max_steps: int | None = key(
        None,
        ge=1,
        resume="warn",
        help="Steps to do: optimizer updates; in RL, rounds of sampling and updating.",
    )
    batch_rows: int = key(32, ge=1, help="Rows of one optimizer update.")
    updates_per_step: int = key(
        1, ge=1, help="Optimizer updates that the samples of a step are split into (RL)."
    )
    packing: bool = key(
        True, help="Choose the rows of a micro-batch so that max_tokens_per_device is filled."
    )
    max_tokens_per_device: int | None = key(
        None,
        ge=2,
        resume="warn",
        help="Tokens of a micro-batch, of which each rank has its own (packing on). Default: 8192; "
        "on a GPU up to 32768, as the memory allows, chosen at start and kept by a resumed run. A "
        "longer row is a micro-batch by itself.",
    )
    micro_batch_rows: int | None = key(
        None, ge=1, resume="warn", help="Rows of a micro-batch (packing off; default 1)."
    )
    share_prompts: bool = key(
        True,
        resume="warn",
        help="Compute a prompt that several rows of a micro-batch begin with once (native decoder, "
        "no dropout). The same result to rounding.",
    )
    lr: float | None = key(
        None,
        ge=0,
        resume="warn",
        help="Peak learning rate. Default, by the method: SFT 2e-5, RL 1e-6; ten times as much for "
        "an adapter (lora).",
    )
    optimizer: AdamWConfig = key(AdamWConfig(), help="The optimizer.")
    schedule: AnySchedule = key(CosineSchedule(), resume="warn", help="Learning rate over the run.")
    max_grad_norm: float | None = key(
        1.0, gt=0, resume="warn", help="Gradients are scaled down to this norm; null: never."
    )
    precision: Literal["auto", "fp32", "bf16"] = key(
        "auto",
        help="bf16: bf16 weights and compute, fp32 master weights, gradients and moments. "
        "auto: bf16 on a GPU, fp32 on a CPU.",
    )
    gradient_checkpointing: Checkpointing = key(
        False,
        resume="free",
        help="Recompute activations in the backward pass: less memory, same result. true: all of "
        "them, about a third slower; selective: norms and gates (native decoder), a third of the "
        "memory for a few percent of the time.",
    )
    logits_chunk_bytes: ByteSize | None = key(
        None,
        ge=2**16,
        resume="warn",
        help="Memory that logits may take at one time. Default: 64 MiB on a CPU; 512 MiB on a GPU, "
        "whose matrix products are slower in small tiles.",
    )
    pin_memory: bool | None = key(
        None, resume="free", help="Page-locked host memory for batches. Default: on a GPU."
    )
    empty_cache_interval: int = key(
        0, ge=0, resume="free", help="Return cached GPU memory every N steps; 0: never."
    )
    on_nonfinite: Literal["skip", "halt"] = key(
        "skip",
        resume="free",
        help="A loss or gradient that is not finite is never applied. Then: skip the step or halt.",
    )
    max_nonfinite_steps: int = key(
        3,
        ge=1,
        resume="free",
        help="Skipped steps in a row after which the run halts. Ten times as many where single "
        "rows are at fault while the others are sound.",
    )
    on_oom: Literal["halve", "halt"] = key(
        "halve",
        resume="free",
        help="Out of memory: retry the step with half the tokens per micro-batch (same gradient), "
        "or halt. Over ranks (fsdp) always halt.",
    )

    def steps_per_epoch(self, num_rows: int, *, rows_per_step: int | None = None) -> int:
        """`rows_per_step`: batch_rows, or in RL the prompts of a step."""
        return math.ceil(num_rows / (rows_per_step or self.batch_rows))

    def total_steps(self, num_rows: int, *, rows_per_step: int | None = None) -> int:
        if self.max_steps is not None:
            return self.max_steps
        return self.steps_per_epoch(num_rows, rows_per_step=rows_per_step) * (self.epochs or 1)

    def learning_rate(self, step: int, total_steps: int) -> float:
        return self.peak_lr * self.schedule.factor(step, total_steps)

    @property
    def peak_lr(self) -> float:
        """The peak learning rate, which is chosen when a recipe is loaded (config/defaults.py)."""
        assert self.lr is not None, "chosen at load"
        return self.lr

    def logits_bytes(self, device_type: str) -> int:
        return self.logits_chunk_bytes or (512 if device_type == "cuda" else 64) * 2**20

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.max_tokens_per_device or DEFAULT_TOKENS

    def rows_per_micro_batch(self) -> int:
        return self.micro_batch_rows or 1
