"""Tinker's cookbook: RL, distillation, DPO and SFT of adapters, trained by a service."""

from __future__ import annotations

from homeostat.health.frameworks.table import Framework

METRICS: dict[str, str] = {
    "env/all/reward/total": "reward",
    "env/all/ac_tokens_per_turn": "completions/mean_length",
    "env/all/ob_tokens_per_turn": "prompts/mean_length",
    "env/all/turns_per_episode": "rollout/num_turns/mean",
    # Groups whose rewards are all alike, from 0.5 on and below it.
    "env/all/by_group/frac_all_good": "zero_std_groups/all_right",
    "env/all/by_group/frac_all_bad": "zero_std_groups/all_wrong",
    "test/env/all/reward/total": "eval/reward",
    "test/env/all/ac_tokens_per_turn": "eval/completions/mean_length",
    "optim/entropy": "entropy",
    "optim/lr": "learning_rate",
    "kl_policy_base": "kl",
    "train_mean_nll": "train/loss",
    "test/nll": "eval/loss",
    "dpo_loss": "train/loss",
    "accuracy": "preference/accuracy",
    "margin": "preference/margin",
    "chosen_reward": "preference/chosen_reward",
    "rejected_reward": "preference/rejected_reward",
    "time/total": "time/step",
    "time/sample": "time/generate",
    "time/sampling": "time/generate",
    "time/train": "time/train",
    "time/run_evals": "time/eval",
    "time/save_checkpoint": "time/checkpoint",
}
SETTINGS: dict[str, tuple[str, ...]] = {
    "model.path": ("model_name",),
    "trainer.lr": ("learning_rate",),
    "trainer.schedule.type": ("lr_schedule",),
    "trainer.epochs": ("num_epochs",),
    "trainer.max_steps": ("max_steps",),
    "trainer.updates_per_step": ("num_substeps",),
    "preference.beta": ("dpo_beta",),
    "lora.rank": ("lora_rank",),
    "algorithm.kl.coefficient": ("kl_penalty_coef",),
    "rollout.prompts_per_step": ("groups_per_batch",),
    "rollout.samples_per_prompt": ("group_size",),
    "rollout.max_new_tokens": ("max_tokens",),
    "rollout.temperature": ("temperature",),
    "rollout.max_staleness": ("max_steps_off_policy",),
    "checkpoint.interval_steps": ("save_every",),
    "eval.interval_steps": ("eval_every",),
}
TABLE = Framework(
    name="tinker",
    title="Tinker",
    metrics=METRICS,
    settings=SETTINGS,
    marks=("tinker_cookbook", "tinker-cookbook", "tinker://"),
)
