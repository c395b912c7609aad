"""Rules of the family agents."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.agents import (
    agt001_agents_oscillate,
    agt002_agent_dominates,
    agt003_tool_calls_failing,
)

RULES: tuple[Rule, ...] = (
    agt001_agents_oscillate.RULE,
    agt002_agent_dominates.RULE,
    agt003_tool_calls_failing.RULE,
)
