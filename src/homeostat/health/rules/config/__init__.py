"""Rules of the family config."""

from __future__ import annotations

from homeostat.health.rule import Rule

RULES: tuple[Rule, ...] = ()
