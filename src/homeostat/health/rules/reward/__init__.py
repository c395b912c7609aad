"""Rules of the family reward."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.reward import rwd001_zero_std_groups

RULES: tuple[Rule, ...] = (rwd001_zero_std_groups.RULE,)
