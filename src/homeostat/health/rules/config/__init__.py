"""Rules of the family config."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.config import (
    cfg001_micro_batch,
    cfg002_group_size_one,
    cfg003_generations_not_dividing,
    cfg004_greedy_sampling,
    cfg005_lr_out_of_band,
    cfg006_warm_up_too_long,
    cfg007_weight_decay_lora,
    cfg008_clip_range,
    cfg009_context_too_short,
    cfg010_checkpointing_mode,
    cfg011_async_prefetch,
    cfg012_token_budget,
    cfg013_gpu_count,
    cfg014_sync_interval,
    cfg015_kl_reference,
    cfg016_quant_group,
    cfg017_nonfinite_check_disabled,
    cfg018_no_gradient_clipping,
    cfg019_dropout_in_rl,
    cfg020_weight_decay,
    cfg021_correction_bound,
)

RULES: tuple[Rule, ...] = (
    cfg001_micro_batch.RULE,
    cfg002_group_size_one.RULE,
    cfg003_generations_not_dividing.RULE,
    cfg004_greedy_sampling.RULE,
    cfg005_lr_out_of_band.RULE,
    cfg006_warm_up_too_long.RULE,
    cfg007_weight_decay_lora.RULE,
    cfg008_clip_range.RULE,
    cfg009_context_too_short.RULE,
    cfg010_checkpointing_mode.RULE,
    cfg011_async_prefetch.RULE,
    cfg012_token_budget.RULE,
    cfg013_gpu_count.RULE,
    cfg014_sync_interval.RULE,
    cfg015_kl_reference.RULE,
    cfg016_quant_group.RULE,
    cfg017_nonfinite_check_disabled.RULE,
    cfg018_no_gradient_clipping.RULE,
    cfg019_dropout_in_rl.RULE,
    cfg020_weight_decay.RULE,
    cfg021_correction_bound.RULE,
)
