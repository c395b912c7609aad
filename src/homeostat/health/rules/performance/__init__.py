"""Rules of the family performance."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.performance import (
    prf001_rollout_underutilised,
    prf002_generation_dominates,
    prf003_data_starved,
    prf005_throughput_falls,
    prf006_step_time_grows,
    prf007_packing_low,
    prf008_gpu_idle,
    prf009_engine_idle,
)

RULES: tuple[Rule, ...] = (
    prf001_rollout_underutilised.RULE,
    prf002_generation_dominates.RULE,
    prf003_data_starved.RULE,
    prf005_throughput_falls.RULE,
    prf006_step_time_grows.RULE,
    prf007_packing_low.RULE,
    prf008_gpu_idle.RULE,
    prf009_engine_idle.RULE,
)
