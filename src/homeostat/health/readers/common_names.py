"""Names that many frameworks share, for logs of frameworks without a table or an entry.

A framework's own table comes first. A name that is in neither is kept as it is.
"""

from __future__ import annotations

import re

# Their name, in lower case with "_" for spaces -> ours.
METRICS: dict[str, str] = {
    "loss": "train/loss",
    "avr_loss": "train/loss",
    "avg_loss": "train/loss",
    "train_loss": "train/loss",
    "training_loss": "train/loss",
    "train/loss": "train/loss",
    "loss/train": "train/loss",
    "loss_train": "train/loss",
    "lm_loss": "train/loss",
    "total_loss": "train/loss",
    "policy_loss": "train/loss",
    "pg_loss": "train/loss",
    "eval_loss": "eval/loss",
    "eval/loss": "eval/loss",
    "val_loss": "eval/loss",
    "val/loss": "eval/loss",
    "loss_val": "eval/loss",
    "validation_loss": "eval/loss",
    "eval_reward": "eval/reward",
    "eval/reward": "eval/reward",
    "grad_norm": "grad_norm",
    "gradnorm": "grad_norm",
    "gnorm": "grad_norm",
    "grad._norm": "grad_norm",
    "gradient_norm": "grad_norm",
    "train/grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "lr": "learning_rate",
    "train/lr": "learning_rate",
    "train/learning_rate": "learning_rate",
    "act_lr": "learning_rate",
    "actor_lr": "learning_rate",
    "epoch": "epoch",
    "train/epoch": "epoch",
    "reward": "reward",
    "rewards": "reward",
    "mean_reward": "reward",
    "avg_reward": "reward",
    "reward_mean": "reward",
    "reward/mean": "reward",
    "rewards/mean": "reward",
    "train/reward": "reward",
    "avg_final_rewards": "reward",
    "rollout/ep_rew_mean": "reward",
    "ep_rew_mean": "reward",
    "episode_reward_mean": "reward",
    "mean_episode_reward": "reward",
    "charts/episodic_return": "reward",
    "reward_std": "reward_std",
    "reward/std": "reward_std",
    "kl": "kl",
    "mean_kl": "kl",
    "kl_mean": "kl",
    "kl_divergence": "kl",
    "objective/kl": "kl",
    "approx_kl": "policy/update_kl",
    "ppo_kl": "policy/update_kl",
    "entropy": "entropy",
    "policy_entropy": "entropy",
    "mean_entropy": "entropy",
    "objective/entropy": "entropy",
    "clip_fraction": "clip_ratio/region_mean",
    "clipfrac": "clip_ratio/region_mean",
    "clip_frac": "clip_ratio/region_mean",
    "clip_ratio": "clip_ratio/region_mean",
    "completion_length": "completions/mean_length",
    "mean_completion_length": "completions/mean_length",
    "response_length": "completions/mean_length",
    "mean_response_length": "completions/mean_length",
    "avg_response_length": "completions/mean_length",
    "avg_response_len": "completions/mean_length",
    "avg_completion_length": "completions/mean_length",
    "response_length/mean": "completions/mean_length",
    "response_length/max": "completions/max_length",
    "response_length/min": "completions/min_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
    "mean_generation_length": "completions/mean_length",
    "generation_length": "completions/mean_length",
    "truncated_ratio": "completions/clipped_ratio",
    "num_tokens": "num_tokens",
    "step_time": "time/step",
    "time/step": "time/step",
    "tps": "throughput/tokens_per_s",
    "tokens_per_second": "throughput/tokens_per_s",
    "tokens_per_sec": "throughput/tokens_per_s",
    "throughput": "throughput/tokens_per_s",
}

# Their setting, in lower case with "_" for "-" -> our key.
SETTINGS: dict[str, str] = {
    "learning_rate": "trainer.lr",
    "lr": "trainer.lr",
    "max_grad_norm": "trainer.max_grad_norm",
    "clip_grad": "trainer.max_grad_norm",
    "grad_clip": "trainer.max_grad_norm",
    "num_train_epochs": "trainer.epochs",
    "num_epochs": "trainer.epochs",
    "max_steps": "trainer.max_steps",
    "weight_decay": "trainer.optimizer.weight_decay",
    "warmup_steps": "trainer.schedule.warmup_steps",
    "warmup_ratio": "trainer.schedule.warmup_share",
    "lr_scheduler_type": "trainer.schedule.type",
    "gradient_checkpointing": "trainer.gradient_checkpointing",
    "temperature": "rollout.temperature",
    "num_generations": "rollout.samples_per_prompt",
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "group_size": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_new_tokens",
    "max_new_tokens": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "gpu_memory_utilization": "engine.memory_share",
    "mem_fraction_static": "engine.memory_share",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "enforce_eager": "engine.enforce_eager",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "cutoff_len": "data.max_length",
    "packing": "trainer.packing",
    "seed": "seed",
    "model": "model.path",
    "model_name_or_path": "model.path",
    "attn_implementation": "model.attention",
}

# Words that identify a number as a metric, in a name that no table has.
_WORDS = re.compile(
    r"loss|reward|grad|(?:^|[/_ ])lr(?:$|[/_(-])|learning_rate|(?:^|[/_])kl|entropy|accurac|perplex"
    r"|(?:^|[/_])ppl|throughput|tokens_per|tok/s|(?:^|[/_])tps$|clip_?(?:ratio|frac)|advantage"
    r"|logp|log_prob|objective/|response_len|completion|mean_scores|score/|(?:^|[/_])mfu"
    r"|staleness|margins|pass@|runtime|samples_per_second|steps_per_second|perf/|timing|rollout/",
    re.IGNORECASE,
)
# One of these identifies a mapping as settings.
_ONLY_SETTINGS = frozenset(
    {
        "seed",
        "output_dir",
        "bf16",
        "fp16",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_steps",
        "num_train_epochs",
        "weight_decay",
        "model_name_or_path",
        "lora_r",
        "lora_alpha",
        "num_generations",
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "train_batch_size",
        "micro_batch_size",
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "optimizer",
        "optim",
        "warmup_steps",
        "warmup_ratio",
        "lr_scheduler_type",
        "tensor_parallel_size",
        "zero_optimization",
        "dtype",
        "torch_dtype",
        "max_seq_length",
    }
)


def folded(name: str) -> str:
    return name.strip().lower().replace(" ", "_")


def sounds_like_metric(name: str) -> bool:
    return folded(name) in METRICS or _WORDS.search(name) is not None


def is_only_setting(name: str) -> bool:
    return name in _ONLY_SETTINGS
