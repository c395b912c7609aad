"""ms-swift: flags over transformers, TRL or Megatron, with its own GRPO."""

from __future__ import annotations

from homeostat.health.frameworks import transformers, trl
from homeostat.health.frameworks.table import Framework

GIB = 2.0**30

METRICS: dict[str, str] = {
    **trl.METRICS,
    "token_acc": "train/token_accuracy",
    "memory(GiB)": "memory/max_alloc",
    "entropy/mean": "entropy",
    "num_turns": "rollout/num_turns/mean",
    "rollout_correction/k3_kl": "sampling/k3",
    "rollout_correction/is_weight_mean": "sampling/importance_sampling_ratio/mean",
    "rollout_correction/ess": "sampling/ess",
    "train_speed(s/it)": "time/step",
    "eval_token_acc": "eval/score/token_acc",
}
SETTINGS: dict[str, tuple[str, ...]] = {
    **trl.SETTINGS,
    "model.path": ("--model",),
    "model.attention": ("--attn_impl",),
    "model.quantization": ("--quant_bits",),
    "data.template": ("--template",),
    "data.max_length": ("--max_length",),
    "data.overlong": ("--truncation_strategy",),
    "data.num_processes": ("--dataset_num_proc", "--dataloader_num_workers"),
    "data.validation_share": ("--split_dataset_ratio",),
    "trainer.packing": ("--packing", "--padding_free"),
    "trainer.precision": ("--torch_dtype",),
    "trainer.backend.type": ("--deepspeed", "--fsdp"),
    "trainer.backend.sequence_parallel_size": ("--sequence_parallel_size",),
    "trainer.backend.offload_params": ("--offload_model",),
    "trainer.backend.offload_optimizer": ("--offload_optimizer",),
    "algorithm.type": ("--rlhf_type",),
    "algorithm.dynamic_sampling": ("--dynamic_sample",),
    "algorithm.dynamic_sampling.max_rounds": ("--max_resample_times",),
    "algorithm.overlong": ("--overlong_filter",),
    "algorithm.overlong.buffer_tokens": ("--soft_cache_length",),
    "algorithm.correction.weight.type": ("--rollout_importance_sampling_mode",),
    "algorithm.correction.weight.high": ("--rollout_importance_sampling_threshold",),
    "algorithm.correction.off_policy_mask": ("--off_policy_sequence_mask_delta",),
    "rollout.max_turns": ("--max_turns",),
    "rollout.max_staleness": ("--async_generate",),
    "engine.max_model_length": ("--vllm_max_model_len",),
    "engine.max_concurrency": ("--vllm_max_num_seqs",),
    "engine.enforce_eager": ("--vllm_enforce_eager",),
    "engine.prefix_caching": ("--vllm_enable_prefix_caching",),
    "engine.sleep": ("--sleep_level",),
    "lora.rank": ("--lora_rank",),
    "lora.targets": ("--target_modules",),
}
TABLE = Framework(
    name="ms_swift",
    title="ms-swift",
    base="trl",
    metrics=METRICS,
    scales={"memory/max_alloc": GIB},
    settings=SETTINGS,
    flags=transformers.FLAGS,
    marks=(
        "[INFO:swift]",
        "[WARNING:swift]",
        "/swift/",
        "swift rlhf",
        "swift sft",
        "swift rollout",
    ),
)
