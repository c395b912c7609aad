"""Rules of the family sync."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.sync import (
    syn001_weights_not_updated,
    syn002_garbage_after_sync,
    syn003_engine_weights_wrong,
    syn004_engine_weights_differ,
    syn005_slow_sync,
    syn006_hang_after_update,
)

RULES: tuple[Rule, ...] = (
    syn001_weights_not_updated.RULE,
    syn002_garbage_after_sync.RULE,
    syn003_engine_weights_wrong.RULE,
    syn004_engine_weights_differ.RULE,
    syn005_slow_sync.RULE,
    syn006_hang_after_update.RULE,
)
