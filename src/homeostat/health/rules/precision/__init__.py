"""Rules of the family precision."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.precision import (
    qnt001_fp8_rollout_garbage,
    qnt002_quantisation_gap,
    qnt003_dtype_odd,
)

RULES: tuple[Rule, ...] = (
    qnt001_fp8_rollout_garbage.RULE,
    qnt002_quantisation_gap.RULE,
    qnt003_dtype_odd.RULE,
)
