"""Rules of the family reward."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.reward import (
    rwd001_zero_std_groups,
    rwd002_reward_always_zero,
    rwd003_reward_function_constant,
    rwd004_reward_constant,
    rwd005_reward_saturated,
    rwd006_reward_collapse,
    rwd007_reward_hacking,
    rwd008_reward_tracks_length,
    rwd009_reward_scale_huge,
    rwd010_reward_too_noisy,
    rwd011_reward_fn_failing,
    rwd012_reward_fn_returns_none,
    rwd013_reward_slow,
    rwd014_unweighted_reward_logged,
    rwd015_reward_not_rising,
)

RULES: tuple[Rule, ...] = (
    rwd001_zero_std_groups.RULE,
    rwd002_reward_always_zero.RULE,
    rwd003_reward_function_constant.RULE,
    rwd004_reward_constant.RULE,
    rwd005_reward_saturated.RULE,
    rwd006_reward_collapse.RULE,
    rwd007_reward_hacking.RULE,
    rwd008_reward_tracks_length.RULE,
    rwd009_reward_scale_huge.RULE,
    rwd010_reward_too_noisy.RULE,
    rwd011_reward_fn_failing.RULE,
    rwd012_reward_fn_returns_none.RULE,
    rwd013_reward_slow.RULE,
    rwd014_unweighted_reward_logged.RULE,
    rwd015_reward_not_rising.RULE,
)
