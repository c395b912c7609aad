"""Rules of the family numerics."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.numerics import (
    num001_nan_poisoned_weights,
    num002_nan_loss,
    num003_fp16_overflow,
    num004_attention_kernel_nan,
    num005_steps_skipped,
    num006_nonfinite_isolated,
    num007_update_below_resolution,
    num008_update_too_large,
)

RULES: tuple[Rule, ...] = (
    num001_nan_poisoned_weights.RULE,
    num002_nan_loss.RULE,
    num003_fp16_overflow.RULE,
    num004_attention_kernel_nan.RULE,
    num005_steps_skipped.RULE,
    num006_nonfinite_isolated.RULE,
    num007_update_below_resolution.RULE,
    num008_update_too_large.RULE,
)
