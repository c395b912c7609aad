"""Rules of the family offpolicy."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.offpolicy import (
    off001_engine_logprob_mismatch,
    off002_train_infer_drift,
    off003_truncated_sampling_bias,
    off004_sequence_is_collapse,
    off005_stale_policy,
    off006_correction_masks_most,
    off007_multi_turn_token_mismatch,
    off008_gap_jumps,
)

RULES: tuple[Rule, ...] = (
    off001_engine_logprob_mismatch.RULE,
    off002_train_infer_drift.RULE,
    off003_truncated_sampling_bias.RULE,
    off004_sequence_is_collapse.RULE,
    off005_stale_policy.RULE,
    off006_correction_masks_most.RULE,
    off007_multi_turn_token_mismatch.RULE,
    off008_gap_jumps.RULE,
)
