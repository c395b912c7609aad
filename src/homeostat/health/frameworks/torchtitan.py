"""torchtitan: pre-training and fine-tuning on device meshes."""

from __future__ import annotations

from homeostat.health.frameworks.table import Framework

GIB = 2.0**30

METRICS: dict[str, str] = {
    "loss": "train/loss",
    "grad_norm": "grad_norm",
    "lr": "learning_rate",
    "memory": "memory/max_reserved",
    "tps": "throughput/tokens_per_s_per_device",
    "mfu": "throughput/mfu",
    "loss_metrics/global_avg_loss": "train/loss",
    "loss_metrics/global_max_loss": "train/rank_loss_max",
    "validation_metrics/loss": "eval/loss",
    "throughput(tps)": "throughput/tokens_per_s_per_device",
    "memory/max_active(GiB)": "memory/max_alloc",
    "memory/max_reserved(GiB)": "memory/max_reserved",
    "time_metrics/data_loading(s)": "time/data_wait",
    "time_metrics/end_to_end(s)": "time/step",
}
SETTINGS: dict[str, tuple[str, ...]] = {
    "seed": ("debug.seed", "training.seed"),
    "trainer.lr": ("optimizer.lr",),
    "trainer.optimizer.type": ("optimizer.name",),
    "trainer.optimizer.weight_decay": ("optimizer.weight_decay",),
    "trainer.optimizer.eps": ("optimizer.eps",),
    "trainer.schedule.warmup_steps": ("lr_scheduler.warmup_steps",),
    "trainer.schedule.decay_share": ("lr_scheduler.decay_ratio",),
    "trainer.schedule.type": ("lr_scheduler.decay_type",),
    "trainer.schedule.min_lr_share": ("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min"),
    "trainer.max_grad_norm": ("training.max_norm",),
    "trainer.max_steps": ("training.steps",),
    "trainer.micro_batch_rows": ("training.local_batch_size", "training.batch_size"),
    "trainer.batch_rows": ("training.global_batch_size",),
    "data.max_length": ("training.seq_len",),
    "trainer.gradient_checkpointing": ("activation_checkpoint.mode",),
    "trainer.backend.offload_params": ("training.enable_cpu_offload",),
    "trainer.backend.reshard_after_forward": ("parallelism.fsdp_reshard_after_forward",),
    "trainer.backend.replicas": ("parallelism.data_parallel_replicate_degree",),
    "trainer.backend.tensor_parallel_size": ("parallelism.tensor_parallel_degree",),
    "trainer.backend.context_parallel_size": ("parallelism.context_parallel_degree",),
    "trainer.backend.pipeline_parallel_size": ("parallelism.pipeline_parallel_degree",),
    "trainer.backend.expert_parallel_size": ("parallelism.expert_parallel_degree",),
    "cluster.processes": (
        "parallelism.data_parallel_shard_degree",
        "training.data_parallel_shard_degree",
    ),
    "cluster.timeout_s": ("comm.train_timeout_seconds",),
    "checkpoint.interval_steps": ("checkpoint.interval",),
    "checkpoint.keep_last": ("checkpoint.keep_latest_k",),
    "checkpoint.load_step": ("checkpoint.load_step",),
}
TABLE = Framework(
    name="torchtitan",
    title="torchtitan",
    metrics=METRICS,
    scales={"memory/max_alloc": GIB, "memory/max_reserved": GIB},
    settings=SETTINGS,
    marks=("[titan]", "torchtitan"),
)
