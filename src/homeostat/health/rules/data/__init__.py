"""Rules of the family data."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.data import (
    dat001_all_labels_masked,
    dat002_rows_without_training,
    dat003_trained_share_tiny,
    dat004_rows_dropped,
    dat005_rows_truncated,
    dat006_duplicate_rows,
    dat007_pad_equals_eos,
    dat008_token_round_trip,
    dat009_mask_accounting,
    dat010_data_repeated,
    dat011_validation_overlap,
    dat012_tokenizer_mismatch,
)

RULES: tuple[Rule, ...] = (
    dat001_all_labels_masked.RULE,
    dat002_rows_without_training.RULE,
    dat003_trained_share_tiny.RULE,
    dat004_rows_dropped.RULE,
    dat005_rows_truncated.RULE,
    dat006_duplicate_rows.RULE,
    dat007_pad_equals_eos.RULE,
    dat008_token_round_trip.RULE,
    dat009_mask_accounting.RULE,
    dat010_data_repeated.RULE,
    dat011_validation_overlap.RULE,
    dat012_tokenizer_mismatch.RULE,
)
