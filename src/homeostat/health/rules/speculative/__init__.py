"""Rules of the family speculative."""

from __future__ import annotations

from homeostat.health.rule import Rule

RULES: tuple[Rule, ...] = ()
