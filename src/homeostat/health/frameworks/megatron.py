"""Megatron-LM's arguments and metrics. slime, miles and ChatLearn pass them through."""

from __future__ import annotations

from homeostat.health.frameworks.table import Framework

METRICS: dict[str, str] = {
    "lm loss": "train/loss",
    "lm-loss-training/lm loss": "train/loss",
    "lm-loss-validation/lm loss validation": "eval/loss",
    "grad norm": "grad_norm",
    "learning rate": "learning_rate",
    "loss scale": "train/loss_scale",
    "load_balancing_loss": "moe/aux_loss",
    "seq_load_balancing_loss": "moe/aux_loss",
    "z_loss": "moe/z_loss",
    "number of skipped iterations": "train/skipped_since_record",
    "elapsed time per iteration (ms)": "time/step",
}
SETTINGS: dict[str, tuple[str, ...]] = {
    "seed": ("--seed",),
    "trainer.lr": ("--lr",),
    "trainer.schedule.type": ("--lr-decay-style",),
    "trainer.schedule.warmup_steps": ("--lr-warmup-iters",),
    "trainer.schedule.warmup_share": ("--lr-warmup-fraction",),
    "trainer.optimizer.type": ("--optimizer",),
    "trainer.optimizer.weight_decay": ("--weight-decay",),
    "trainer.optimizer.beta1": ("--adam-beta1",),
    "trainer.optimizer.beta2": ("--adam-beta2",),
    "trainer.optimizer.eps": ("--adam-eps",),
    "trainer.max_grad_norm": ("--clip-grad",),
    "trainer.mini_batch_rows": ("--global-batch-size",),
    "trainer.micro_batch_rows": ("--micro-batch-size",),
    "trainer.gradient_checkpointing": ("--recompute-granularity",),
    "trainer.backend.tensor_parallel_size": ("--tensor-model-parallel-size",),
    "trainer.backend.pipeline_parallel_size": ("--pipeline-model-parallel-size",),
    "trainer.backend.context_parallel_size": ("--context-parallel-size",),
    "trainer.backend.expert_parallel_size": ("--expert-model-parallel-size",),
    "trainer.backend.offload_optimizer": ("--optimizer-cpu-offload",),
    "trainer.fp8.recipe": ("--fp8-recipe",),
    "trainer.fp8.format": ("--fp8-format",),
    "model.moe.aux_loss_coefficient": ("--moe-aux-loss-coeff",),
    "model.moe.z_loss_coefficient": ("--moe-z-loss-coeff",),
    "model.moe.capacity_factor": ("--moe-expert-capacity-factor",),
    "model.moe.router_bias_update_rate": ("--moe-router-bias-update-rate",),
    "cluster.timeout_s": ("--distributed-timeout-minutes",),
    "checkpoint.interval_steps": ("--save-interval",),
    "checkpoint.resume": ("--load",),
}
FLAGS: dict[str, tuple[str, object]] = {
    "bf16": ("trainer.precision", "bf16"),
    "fp16": ("trainer.precision", "fp16"),
}
TABLE = Framework(
    name="megatron",
    title="Megatron-LM",
    metrics=METRICS,
    scales={"time/step": 0.001},
    settings=SETTINGS,
    flags=FLAGS,
    marks=("megatron/training/", "elapsed time per iteration (ms):", "pretrain_gpt.py"),
)
