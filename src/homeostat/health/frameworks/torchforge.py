"""torchforge: RL on Monarch actors, torchtitan and vLLM."""

from __future__ import annotations

from homeostat.health.frameworks.table import Framework

METRICS: dict[str, str] = {
    "rl_trainer/avg_loss": "train/loss",
    "rl_trainer/loss": "train/loss",
    "grpo_loss/total_loss": "train/loss",
    "grpo_loss/policy_gradient_loss": "train/policy_loss",
    "grpo_loss/kl_divergence_mean": "kl",
    "grpo_loss/kl_divergence_max": "kl/max",
    "grpo_loss/policy_entropy": "entropy",
    "rl_trainer/step/avg_kl_divergence": "kl",
    "rl_trainer/step/avg_policy_entropy": "entropy",
    "grpo_loss/advantage_mean": "advantages/mean",
    "grpo_loss/advantage_std": "advantages/std",
    "episode/avg_response_tokens": "completions/mean_length",
    "episode/max_response_tokens": "completions/max_length",
    "rl_trainer/learning_rate": "learning_rate",
    "rl_trainer/grad_norm": "grad_norm",
    "reward/evaluate_response/avg_total_reward": "reward",
    "reward/evaluate_response/avg_<name>_reward": "rewards/<name>/mean",
    "reward/evaluate_response/std_<name>_reward": "rewards/<name>/std",
    "buffer/sample/avg_sampled_policy_age": "stale/steps/mean",
    "buffer/sample/max_sampled_policy_age": "stale/steps/max",
    "generator/generate/avg_tokens_generated": "completions/mean_length",
    "reference_perf/forward/avg_sequence_length": "sequences/mean_length",
    "rl_trainer_perf/step/total_duration_avg_s": "time/train",
    "rl_trainer_perf/push_weights/total_duration_avg_s": "sync/seconds",
    "generator_perf/generate/total_duration_avg_s": "time/generate",
    "dataset/sample/current_epoch": "epoch",
    "ForgeSFTRecipe/train_step/loss": "train/loss",
}
SETTINGS: dict[str, tuple[str, ...]] = {
    "model.path": ("model",),
    "trainer.lr": ("trainer.optimizer.lr", "optimizer.lr"),
    "trainer.schedule.warmup_steps": (
        "trainer.lr_scheduler.warmup_steps",
        "lr_scheduler.warmup_steps",
    ),
    "trainer.max_grad_norm": ("trainer.training.max_norm",),
    "trainer.max_steps": ("trainer.training.steps",),
    "trainer.micro_batch_rows": ("local_batch_size",),
    "trainer.gradient_checkpointing": ("trainer.activation_checkpoint.mode",),
    "trainer.backend.tensor_parallel_size": ("trainer.parallelism.tensor_parallel_degree",),
    "trainer.backend.context_parallel_size": ("trainer.parallelism.context_parallel_degree",),
    "trainer.backend.expert_parallel_size": ("trainer.parallelism.expert_parallel_degree",),
    "algorithm.kl.coefficient": ("beta",),
    "rollout.samples_per_prompt": ("group_size",),
    "rollout.max_prompt_tokens": ("max_req_tokens",),
    "rollout.max_new_tokens": ("max_res_tokens",),
    "rollout.temperature": ("policy.sampling_params.temperature",),
    "rollout.top_p": ("policy.sampling_params.top_p",),
    "rollout.max_staleness": ("off_by_n", "replay_buffer.max_policy_age"),
    "engine.tensor_parallel_size": ("policy.engine_args.tensor_parallel_size",),
    "engine.enforce_eager": ("policy.engine_args.enforce_eager",),
    "engine.memory_share": ("policy.engine_args.gpu_memory_utilization",),
    "engine.data_parallel_size": ("services.policy.num_replicas",),
    "checkpoint.interval_steps": ("trainer.checkpoint.interval",),
}
TABLE = Framework(
    name="torchforge",
    title="torchforge",
    metrics=METRICS,
    settings=SETTINGS,
    marks=("[global_reduce] - METRICS STEP", "[GlobalReduce]", "forge/actors", "torchforge"),
)
