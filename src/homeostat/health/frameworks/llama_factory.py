"""LLaMA-Factory: YAML or flags over transformers and TRL."""

from __future__ import annotations

from homeostat.health.frameworks import transformers, trl
from homeostat.health.frameworks.table import Framework

METRICS: dict[str, str] = {
    **trl.METRICS,
    # Its short log names the shares of pairs in DPO so.
    "accuracy": "preference/accuracy",
    "reward": "reward",
    "lr": "learning_rate",
    "throughput": "throughput/tokens_per_s",
    "predict_loss": "eval/loss",
}
SETTINGS: dict[str, tuple[str, ...]] = {
    **transformers.SETTINGS,
    "model.path": ("model_name_or_path",),
    "model.attention": ("flash_attn",),
    "model.quantization": ("quantization_bit",),
    "data.template": ("template",),
    "data.max_length": ("cutoff_len",),
    "data.num_processes": ("preprocessing_num_workers",),
    "data.train_on_prompt": ("train_on_prompt",),
    "data.validation_share": ("val_size",),
    "data.train.weight": ("interleave_probs",),
    "trainer.packing": ("packing", "neat_packing"),
    "trainer.backend.type": ("deepspeed", "fsdp"),
    "algorithm.type": ("stage",),
    "algorithm.loss_type": ("pref_loss",),
    "preference.beta": ("pref_beta",),
    "algorithm.label_smoothing": ("dpo_label_smoothing",),
    "algorithm.sft_weight": ("pref_ftx",),
    "algorithm.target_margin": ("simpo_gamma",),
    "algorithm.desirable_weight": ("kto_chosen_weight",),
    "algorithm.undesirable_weight": ("kto_rejected_weight",),
    "algorithm.kl.target": ("ppo_target",),
    "trainer.epochs_per_step": ("ppo_epochs",),
    "rollout.prompts_per_step": ("ppo_buffer_size",),
    "rollout.max_new_tokens": ("max_new_tokens",),
    "rollout.temperature": ("temperature",),
    "rollout.top_p": ("top_p",),
    "rollout.top_k": ("top_k",),
    "rewards.model": ("reward_model",),
    "model.moe.aux_loss_coefficient": ("moe_aux_loss_coef",),
    "data.train.path": ("dataset",),
    "data.train.limit": ("max_samples",),
    "data.validation.path": ("eval_dataset",),
    "lora.path": ("adapter_name_or_path",),
    "lora.enabled": ("finetuning_type",),
    "lora.rank": ("lora_rank",),
    "lora.alpha": ("lora_alpha",),
    "lora.dropout": ("lora_dropout",),
    "lora.targets": ("lora_target",),
}
TABLE = Framework(
    name="llama_factory",
    title="LLaMA-Factory",
    base="transformers",
    built_on=("trl",),
    metrics=METRICS,
    settings=SETTINGS,
    flags={
        **transformers.FLAGS,
        "pure_bf16": ("trainer.precision", "bf16"),
        "disable_gradient_checkpointing": ("trainer.gradient_checkpointing", False),
    },
    marks=(
        "llamafactory",
        "llmtuner",
        "LLaMA-Factory",
        "LLaMA-Efficient-Tuning",
        "train_bash.py",
        "finetuning_type",
    ),
)
