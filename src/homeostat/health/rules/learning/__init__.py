"""Rules of the family learning."""

from __future__ import annotations

from homeostat.health.rule import Rule

RULES: tuple[Rule, ...] = ()
