"""Rules of the family distributed."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.distributed import (
    dst001_uneven_tokens,
    dst002_engine_restarts,
    dst003_uneven_devices,
)

RULES: tuple[Rule, ...] = (
    dst001_uneven_tokens.RULE,
    dst002_engine_restarts.RULE,
    dst003_uneven_devices.RULE,
)
