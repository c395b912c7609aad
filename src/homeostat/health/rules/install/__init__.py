"""Rules of the family install."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.install import (
    env001_environment_unfit,
    env002_bf16_on_cpu,
    env003_threads_odd,
    env004_compile_cache_corrupt,
)

RULES: tuple[Rule, ...] = (
    env001_environment_unfit.RULE,
    env002_bf16_on_cpu.RULE,
    env003_threads_odd.RULE,
    env004_compile_cache_corrupt.RULE,
)
