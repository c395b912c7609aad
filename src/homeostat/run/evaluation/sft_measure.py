"""Compute the metrics of an SFT step, and the loss of the held-out rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from homeostat.algorithms import sft
from homeostat.data.inputs import RowSet
from homeostat.data.loader import eval_batches
from homeostat.data.mixing import source_shares
from homeostat.data.store import RowStore
from homeostat.observe.devices import host_rss
from homeostat.run.evaluation.expert_load import load_metrics
from homeostat.run.learning.probes import plan_probes
from homeostat.run.sizing.token_budget import current_sizes
from homeostat.train.forward import predicted_positions
from homeostat.train.oom import MemoryGuard
from homeostat.train.scoring import score
from homeostat.types import Role, StepPlan, TrainBatch, UpdateReport

if TYPE_CHECKING:
    from homeostat.run.wiring.sft_setup import Parts


def step_metrics(
    plan: StepPlan, report: UpdateReport, *, parts: Parts, seconds: float
) -> dict[str, float]:
    """Return the metrics of one update, by their names in observe/names.py."""
    trained = sum(int(np.count_nonzero(batch.weights_N)) for batch in plan.micro_batches)
    steps_per_epoch = parts.config.trainer.steps_per_epoch(len(parts.train_rows.ids))
    memory = parts.trainer.memory_report()
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
        "memory/max_alloc": memory.max_alloc,
        "memory/max_reserved": memory.max_reserved,
        "memory/host_rss": host_rss(),
    }
    if parts.config.trainer.packing:
        budget = current_sizes(parts.config.trainer, parts.state).tokens_per_micro_batch
        metrics["data/packing_fill"] = plan.num_tokens / (report.num_micro_batches * budget)
    rows = np.concatenate([batch.row_ids_B for batch in plan.micro_batches])
    sources = parts.train_rows.rows.source_B[rows]
    metrics |= source_shares(sources, parts.config.data.source_names)
    metrics |= load_metrics([report], parts.config.model.moe, sheet=parts.trainer.sheet)
    return metrics | plan_probes(plan, report) | parts.gpus.sample()


def evaluate(parts: Parts, rows: RowSet[RowStore], *, memory: MemoryGuard) -> float:
    """Return the loss of all held-out rows, normalised as in training."""
    spec = sft.loss_spec(parts.config.sft, [rows.rows[int(row)] for row in rows.ids])

    def total(batches: list[TrainBatch]) -> float:
        found = torch.zeros((), dtype=torch.float64)
        scores = score(parts.trainer, Role.POLICY, batches)
        for batch, logp_M in zip(batches, scores, strict=True):
            index_M, row_of_M = map(torch.from_numpy, predicted_positions(batch))
            weights_M = torch.from_numpy(batch.weights_N)[index_M]
            nll_B, weight_B = sft.row_sums(
                torch.from_numpy(logp_M), weights_M, row_of_M, batch.num_rows
            )
            found += sft.loss(nll_B.double(), weight_B.double(), spec)
        return float(found)

    step, loss = parts.state.step, None
    while loss is None:
        sizes = current_sizes(parts.config.trainer, parts.state)
        groups = parts.trainer.num_data_groups
        batches = list(eval_batches(rows.rows, rows.ids, trainer=sizes, num_data_groups=groups))
        loss = memory.attempt(lambda batches=batches: total(batches), role=Role.POLICY, step=step)
        if loss is None:
            memory.shrink(batches, step=step)
    return loss
