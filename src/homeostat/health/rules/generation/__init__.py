"""Rules of the family generation."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.generation import (
    gen001_truncation_at_cap,
    gen002_no_eos,
    gen003_empty_completions,
    gen004_repetition,
    gen005_kv_preemptions,
    gen006_deadline_cuts,
    gen007_engine_stands_still,
)

RULES: tuple[Rule, ...] = (
    gen001_truncation_at_cap.RULE,
    gen002_no_eos.RULE,
    gen003_empty_completions.RULE,
    gen004_repetition.RULE,
    gen005_kv_preemptions.RULE,
    gen006_deadline_cuts.RULE,
    gen007_engine_stands_still.RULE,
)
