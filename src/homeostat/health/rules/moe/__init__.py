"""Rules of the family moe."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.moe import (
    moe001_routing_mismatch,
    moe002_load_imbalance,
    moe003_tokens_dropped,
    moe004_router_loss_in_rl,
)

RULES: tuple[Rule, ...] = (
    moe001_routing_mismatch.RULE,
    moe002_load_imbalance.RULE,
    moe003_tokens_dropped.RULE,
    moe004_router_loss_in_rl.RULE,
)
