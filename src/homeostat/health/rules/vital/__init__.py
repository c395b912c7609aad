"""Vital signs as findings: how a run ended, and what of it is not finite, zero or frozen."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.vital import (
    vit001_user_code_failed,
    vit002_ended_in_exception,
    vit003_stopped_early,
    vit004_not_finite,
    vit005_nothing_moves,
    vit006_script_failed,
)

RULES: tuple[Rule, ...] = (
    vit001_user_code_failed.RULE,
    vit002_ended_in_exception.RULE,
    vit003_stopped_early.RULE,
    vit004_not_finite.RULE,
    vit005_nothing_moves.RULE,
    vit006_script_failed.RULE,
)
