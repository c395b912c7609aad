"""Rules of the family policy."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.policy import (
    pol001_entropy_collapse,
    pol002_entropy_explosion,
    pol003_entropy_token_sum,
    pol004_kl_runaway,
    pol005_kl_estimator_overflow,
    pol006_negative_kl,
    pol007_clip_fraction_high,
    pol008_gspo_clipfrac,
    pol009_ratio_exceeds,
    pol010_first_ratio,
    pol011_length_explosion,
    pol012_length_growth,
    pol013_policy_collapse,
    pol014_length_bias_shrinking,
    pol015_mode_collapse,
    pol016_kl_penalty_too_strong,
    pol017_ebft_samples_alike,
)

RULES: tuple[Rule, ...] = (
    pol001_entropy_collapse.RULE,
    pol002_entropy_explosion.RULE,
    pol003_entropy_token_sum.RULE,
    pol004_kl_runaway.RULE,
    pol005_kl_estimator_overflow.RULE,
    pol006_negative_kl.RULE,
    pol007_clip_fraction_high.RULE,
    pol008_gspo_clipfrac.RULE,
    pol009_ratio_exceeds.RULE,
    pol010_first_ratio.RULE,
    pol011_length_explosion.RULE,
    pol012_length_growth.RULE,
    pol013_policy_collapse.RULE,
    pol014_length_bias_shrinking.RULE,
    pol015_mode_collapse.RULE,
    pol016_kl_penalty_too_strong.RULE,
    pol017_ebft_samples_alike.RULE,
)
