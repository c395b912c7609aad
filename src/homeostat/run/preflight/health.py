"""Evaluate the health rules before the first step, on facts that are known without training.

The rules get the settings and the results of the probes below. A rule that needs metrics cannot be
evaluated yet, and is counted as waiting for them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from homeostat.config.run import RunConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.health.diagnose import EXPECTED, TURNED_OFF, diagnose
from homeostat.health.finding import Finding, Level
from homeostat.health.registry import rules_with
from homeostat.health.rules.precision.kinds import FLAGS
from homeostat.health.view import Kind, RunView
from homeostat.observe.environment import num_usable_cpus
from homeostat.observe.processor import this_processor
from homeostat.run.healing.watch import require_known_rules, settings_of
from homeostat.run.preflight.item import Item
from homeostat.run.preflight.item import Level as ItemLevel
from homeostat.run.wiring.compile_cache import view_caches

_ITEM_LEVELS: dict[Level, ItemLevel] = {
    Level.INFO: "ok",
    Level.WARN: "warning",
    Level.ERROR: "error",
}


def health_items(config: RunConfig, facts: Mapping[str, Any]) -> Iterator[Item]:
    """Yield an item for each finding, then one with the number of rules that were evaluated."""
    view = RunView(kind=Kind(config.kind), settings=settings_of(config), facts=facts)
    require_known_rules(config.health)
    found = diagnose(view, rules_with(config.health.rules))
    for finding in found.findings:
        yield Item("health", _ITEM_LEVELS[finding.level], _line(finding), {"code": finding.code})
    waiting = [one for one in found.not_evaluated if not one.why.startswith((TURNED_OFF, EXPECTED))]
    text = (
        f"{found.num_clear + len(found.findings)} rules judged the recipe; "
        f"{len(waiting)} need the metrics of a run. Remedies that "
        f"may be applied: {config.health.heal}"
    )
    yield Item("health", "ok", text, {"findings": len(found.findings)})


def _line(finding: Finding) -> str:
    return f"{finding.code} {finding.name}: {finding.message}"


def disk_facts(folder: Path, *, checkpoint_bytes: int) -> dict[str, Any]:
    """Return the free space of the disk, and the size of a checkpoint on it."""
    free = shutil.disk_usage(folder).free
    return {"disk": {"free_bytes": free, "checkpoint_bytes": checkpoint_bytes}}


def compile_facts(trainer: TrainerConfig) -> dict[str, Any]:
    """Return damaged entries of the compile caches; nothing on a CPU, which uses no such cache."""
    if trainer.device == "cpu" or not torch.cuda.is_available():
        return {}
    return {"compile_cache": view_caches(torch.device("cuda", 0)).facts()}


def machine_facts() -> dict[str, Any]:
    """Return the usable cores, the CPU's instruction sets, and flags that ask for low precision."""
    features = sorted(this_processor().features)
    return {
        "environment": {"cores": num_usable_cpus(), "cpu_features": features},
        "precision_flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
    }
