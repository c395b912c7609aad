"""Names that many frameworks share, for logs of frameworks that have no table or no entry.

A framework's own table takes precedence. A name that neither a table has nor its words explain
(metric_words.py) is kept unchanged.
"""

from __future__ import annotations

import re
from functools import lru_cache

from homeostat.health.readers.values.metric_words import meaning_of

# The name, in lower case with "_" for spaces -> our name. Names that their words explain are only
# here if another framework uses them for something else.
METRICS: dict[str, str] = {
    "train_loss": "train/loss",
    "policy_loss": "train/loss",
    "pg_loss": "train/loss",
    "eval_mean_reward": "eval/reward",
    "act_lr": "learning_rate",
    "epoch": "epoch",
    "train/epoch": "epoch",
    "mean_reward": "reward",
    "return": "reward",
    "avg_final_rewards": "reward",
    "average_reward_score": "reward",
    "total_rewards_std": "reward/std",
    "env_runners/episode_return_mean": "reward",
    "totalreward": "reward",
    "avg_reward_100": "reward",
    "eprewmean": "reward",
    "charts/episodic_return": "reward",
    "accuracy_reward": "rewards/accuracy/mean",
    "accuracy_reward_mean": "rewards/accuracy/mean",
    "format_reward": "rewards/format/mean",
    "format_reward_mean": "rewards/format/mean",
    "acc": "train/accuracy",
    "accuracy": "train/accuracy",
    "reward_std": "reward_std",
    "reward/std": "reward_std",
    "cri_loss": "critic/loss",
    "explained_variance": "critic/explained_variance",
    "explained_var": "critic/explained_variance",
    "objective/kl": "kl",
    "approx_kl": "policy/update_kl",
    "approxkl": "policy/update_kl",
    "ppo_kl": "policy/update_kl",
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
    "resp_len": "completions/mean_length",
    "response_len": "completions/mean_length",
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

# Metrics that a run of RL may log in place of a reward.
RATES = ("mean_score", "avg_score", "score/mean", "scores/mean", "success_rate", "solve_rate",
         "pass_rate", "win_rate")  # fmt: skip

# The setting, in lower case with "_" for "-" -> our key.
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

# Parts of a name which show that a number is a metric, for names that no table has.
_WORDS = re.compile(
    r"loss|reward|grad|(?:^|[/_ ])lr(?:$|[/_(-])|learning_rate|(?:^|[/_])kl|entropy|accurac|perplex"
    r"|(?:^|[/_])ppl|throughput|tokens_per|tok/s|(?:^|[/_])tps$|clip_?(?:ratio|frac)|advantage"
    r"|logp|log_prob|objective/|response_len|completion|mean_scores|score/|(?:^|[/_])mfu"
    r"|staleness|margins|pass@|runtime|samples_per_second|steps_per_second|perf/|timing|rollout/",
    re.IGNORECASE,
)
# A mapping with one of these names is settings, not metrics.
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


_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")


def folded(name: str) -> str:
    """Return a name as the tables write it: "Val Loss" and "ValLoss" become val_loss."""
    text = name.strip()
    if not (text.islower() or text.isupper()):
        text = _HUMP.sub("_", text)
    return text.lower().replace(" ", "_")


@lru_cache(maxsize=4096)
def metric_of(name: str) -> str | None:
    """Return our name of a metric that many frameworks share; None for any other name."""
    found = METRICS.get(folded(name))
    if found is None and (meaning := meaning_of(name)) is not None:
        found = meaning.name
    return found


def sounds_like_metric(name: str) -> bool:
    return metric_of(name) is not None or _WORDS.search(name) is not None


def is_only_setting(name: str) -> bool:
    return name in _ONLY_SETTINGS
