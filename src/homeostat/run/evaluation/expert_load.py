"""Compute the metrics of a step's expert load. Their names are in observe/names.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.config.moe import MoeConfig
from homeostat.models.build import ModelSheet
from homeostat.types import UpdateReport


def step_load(reports: Sequence[UpdateReport]) -> FloatArray64 | None:
    """Return [L, E]: the tokens of every expert in a step's updates; None without experts."""
    loads = [report.load.load_LE for report in reports if report.load is not None]
    return np.sum(loads, axis=0) if loads else None


def load_metrics(
    reports: Sequence[UpdateReport], config: MoeConfig, *, sheet: ModelSheet
) -> dict[str, float]:
    """Return the metrics of the updates of a step; none of a model without experts."""
    found = [report.load for report in reports if report.load is not None]
    load_LE = step_load(reports)
    if sheet.moe is None or load_LE is None or not load_LE.any():
        return {}
    share_LE = load_LE / load_LE.sum(axis=1, keepdims=True)
    relative_LE = share_LE * sheet.moe.num_experts
    metrics = {
        "moe/max_violation": float(relative_LE.max() - 1),
        # A token is counted once in each of its slots.
        "moe/load_max_share": float(share_LE.max() * sheet.moe.top_k),
        "moe/load_min_share": float(relative_LE.min()),
        "moe/dead_experts": float((load_LE == 0).mean()),
    }
    biases = [load.bias_max for load in found if load.bias_max is not None]
    if biases:
        metrics["moe/bias_max"] = max(biases)
    if config.balancing in ("aux", "sequence_aux"):
        metrics["moe/aux_loss"] = float(np.mean([load.aux_loss for load in found]))
    if config.z_loss_coefficient > 0:
        metrics["moe/z_loss"] = float(np.mean([load.z_loss for load in found]))
    if config.capacity_factor is not None:
        dropped = sum(load.num_dropped for load in found)
        metrics["moe/dropped_share"] = float(dropped / load_LE.sum())
    return metrics
