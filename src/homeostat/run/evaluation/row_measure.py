"""Compute the metrics of a step of training on given rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from homeostat.data.mixing import source_shares
from homeostat.observe.devices import host_rss
from homeostat.run.evaluation.expert_load import load_metrics
from homeostat.run.learning.probes import plan_probes
from homeostat.run.sizing.token_budget import current_sizes
from homeostat.train.inspection.device_report import speed_metrics
from homeostat.types import StepPlan, UpdateReport

if TYPE_CHECKING:
    from homeostat.run.wiring.sft_setup import Parts


def step_metrics(
    plan: StepPlan, report: UpdateReport, *, parts: Parts, seconds: float
) -> dict[str, float]:
    """Return the metrics of one update, by their names in observe/names.py."""
    trained = sum(int(np.count_nonzero(batch.weights_N)) for batch in plan.micro_batches)
    steps_per_epoch = parts.config.trainer.steps_per_epoch(len(parts.train_rows))
    device = parts.trainer.device_report()
    metrics = {
        "train/loss": report.loss,
        "train/row_loss_max": float(report.row_losses_B.max()),
        "train/skipped_steps": parts.state.num_skipped,
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "epoch": plan.step / steps_per_epoch,
        "num_tokens": parts.state.num_tokens,
        "time/step": seconds,
        "throughput/tokens_per_s": plan.num_tokens / seconds,
        "throughput/trained_tokens_per_s": trained / seconds,
        "data/trained_share": trained / plan.num_tokens,
        "data/rows": plan.num_rows,
        "data/micro_batches": report.num_micro_batches,
        "memory/max_alloc": device.max_alloc,
        "memory/max_reserved": device.max_reserved,
        "memory/host_rss": host_rss(),
        **speed_metrics(device.probe_seconds),
    }
    if parts.config.trainer.packing:
        budget = current_sizes(parts.config.trainer, parts.state).tokens_per_micro_batch
        metrics["data/packing_fill"] = plan.num_tokens / (report.num_micro_batches * budget)
    rows = np.concatenate([batch.row_ids_B for batch in plan.micro_batches])
    sources = parts.train_rows.rows.source_B[rows]
    metrics |= source_shares(sources, parts.config.data.source_names)
    metrics |= load_metrics([report], parts.config.model.moe, sheet=parts.trainer.sheet)
    return metrics | plan_probes(plan, report) | parts.gpus.sample()
