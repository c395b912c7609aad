"""The miles framework: a fork of slime that adds FSDP, LoRA, FP8/INT4 and speculative training."""

from __future__ import annotations

from homeostat.health.frameworks import slime
from homeostat.health.frameworks.table import Framework

METRICS: dict[str, str] = {
    **slime.METRICS,
    "rollout/spec_accept_ratio": "spec/accept_share",
    "perf/effective_tokens_per_gpu_per_sec": "engine/effective_tokens_per_s",
    "eval/lag_steps": "eval/lag_steps",
}
SETTINGS: dict[str, tuple[str, ...]] = {
    **slime.SETTINGS,
    "trainer.backend.type": ("--train-backend",),
    "trainer.gradient_checkpointing": ("--recompute-granularity", "--gradient-checkpointing"),
    "trainer.backend.offload_params": ("--offload-train", "--fsdp-cpu-offload"),
    "sync.transport.type": ("--update-weight-transfer-mode",),
    "sync.timeout_s": ("--p2p-transfer-timeout",),
    "algorithm.correction.weight.high": ("--tis-clip", "--tis-threshold"),
    "rollout.max_staleness": ("--max-weight-staleness",),
    "lora.rank": ("--lora-rank",),
    "lora.alpha": ("--lora-alpha",),
    "lora.dropout": ("--lora-dropout",),
    "lora.targets": ("--target-modules",),
    "trainer.fp8.skip_layers": ("--extra-high-precision-layers-megatron", "--fp8-skip-layers"),
    "trainer.int4.group_size": ("--int4-group-size",),
    "trainer.int4.skip_layers": ("--int4-skip-layers",),
    "engine.speculative.num_tokens": (
        "--sglang-speculative-num-draft-tokens",
        "--spec-lookahead",
    ),
    "engine.speculative.update_interval": ("--online-sft-interval",),
    "engine.speculative.draft_lr": ("--draft-lr",),
    "agents.update_interval": ("--co-evolution-interval",),
    "agents.update_strategy": ("co_evolution.strategy",),
    "agents.population": ("co_evolution.population_size",),
}
TABLE = Framework(
    name="miles",
    title="miles",
    base="slime",
    metrics=METRICS,
    settings=SETTINGS,
    flags=slime.FLAGS,
    marks=(
        "/miles/",
        "miles/backends/",
        "miles/ray/",
        "miles/utils/",
        "miles.rollout",
        "miles.ray",
        "miles.backends",
        "miles_plugins",
        "MILES_",
    ),
)
