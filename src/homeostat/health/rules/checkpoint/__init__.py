"""Rules of the family checkpoint."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.checkpoint import (
    ckp001_weights_not_loaded,
    ckp002_checkpoint_failing,
    ckp003_checkpoint_missing,
    ckp004_disk_nearly_full,
    ckp005_checkpoint_slow,
    ckp006_resumed_from_older,
)

RULES: tuple[Rule, ...] = (
    ckp001_weights_not_loaded.RULE,
    ckp002_checkpoint_failing.RULE,
    ckp003_checkpoint_missing.RULE,
    ckp004_disk_nearly_full.RULE,
    ckp005_checkpoint_slow.RULE,
    ckp006_resumed_from_older.RULE,
)
