"""DeepSpeed, for logs that show no trainer that uses it."""

from __future__ import annotations

from homeostat.health.frameworks import transformers
from homeostat.health.frameworks.table import Framework

METRICS: dict[str, str] = {
    **transformers.METRICS,
    "Train/Samples/train_loss": "train/loss",
    "Train/Samples/lr": "learning_rate",
    "Train/Samples/loss_scale": "train/loss_scale",
}
SETTINGS: dict[str, tuple[str, ...]] = {
    **transformers.SETTINGS,
    "trainer.lr": ("optimizer.params.lr", "learning_rate", "lr"),
    "trainer.optimizer.weight_decay": ("optimizer.params.weight_decay", "weight_decay"),
    "trainer.schedule.warmup_steps": ("scheduler.params.warmup_num_steps", "warmup_steps"),
    "trainer.max_grad_norm": ("gradient_clipping",),
    "trainer.batch_rows": ("train_batch_size",),
    "trainer.micro_batch_rows": (
        "train_micro_batch_size_per_gpu",
        "per_device_train_batch_size",
    ),
    "trainer.gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "trainer.zero_stage": ("zero_optimization.stage",),
    "trainer.backend.offload_params": ("zero_optimization.offload_param.device",),
    "trainer.backend.offload_optimizer": ("zero_optimization.offload_optimizer.device",),
    "trainer.backend.sequence_parallel_size": ("sequence_parallel_size",),
    "cluster.processes": ("num_gpus", "--num_gpus"),
    "cluster.nodes": ("--num_nodes",),
}
FLAGS: dict[str, tuple[str, object]] = {
    **transformers.FLAGS,
    "bf16.enabled": ("trainer.precision", "bf16"),
    "fp16.enabled": ("trainer.precision", "fp16"),
}
TABLE = Framework(
    name="deepspeed",
    title="DeepSpeed",
    base="transformers",
    metrics=METRICS,
    settings=SETTINGS,
    flags=FLAGS,
    marks=("deepspeed/", "[deepspeed]", "DeepSpeed", "deepspeed==", "[stage3.py:", "[launch.py:"),
)
