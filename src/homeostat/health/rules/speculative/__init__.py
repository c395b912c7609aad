"""Rules of the family speculative."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.speculative import (
    spc001_low_acceptance,
    spc002_draft_drift,
    spc003_benign_moderate,
    spc004_slower,
)

RULES: tuple[Rule, ...] = (
    spc001_low_acceptance.RULE,
    spc002_draft_drift.RULE,
    spc003_benign_moderate.RULE,
    spc004_slower.RULE,
)
