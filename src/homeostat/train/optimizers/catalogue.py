"""The rule of each kind of optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from homeostat.config.optimizer import AnyOptimizer
from homeostat.train.optimizers.adafactor import Adafactor
from homeostat.train.optimizers.adamw import AdamW
from homeostat.train.optimizers.muon import Muon
from homeostat.train.optimizers.slots import Rule

RULES: dict[str, Callable[[Any], Rule]] = {"adamw": AdamW, "muon": Muon, "adafactor": Adafactor}


def rule_of(config: AnyOptimizer) -> Rule:
    """Return the rule that updates weights as a config says."""
    return RULES[config.type](config)
