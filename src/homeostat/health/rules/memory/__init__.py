"""Rules of the family memory."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.memory import (
    mem001_gpu_memory_leak,
    mem002_host_memory_leak,
    mem003_near_limit,
    mem004_fragmented,
    mem005_oom_retries,
)

RULES: tuple[Rule, ...] = (
    mem001_gpu_memory_leak.RULE,
    mem002_host_memory_leak.RULE,
    mem003_near_limit.RULE,
    mem004_fragmented.RULE,
    mem005_oom_retries.RULE,
)
