"""The metric catalogue: every name a run may log, its unit, meaning and how it is reduced.

A record of `metrics.jsonl` stands for all steps since the record before it. `reduce` says how the
steps' values become the record's value:

    mean   plain mean over the steps
    rate   mean over the steps weighted by time/step: all tokens over all seconds
    last   the newest value (counters, schedules, gauges)
    sum    total over the steps
    max    the largest

A value that is not finite makes the mean, sum and maximum it enters not finite: it is never hidden.
A metric with `own_step` belongs to exactly one step, so logging it closes the record there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Reduce(StrEnum):
    MEAN = "mean"
    RATE = "rate"
    LAST = "last"
    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One line of the catalogue. `<i>` in a name stands for a number."""

    name: str
    unit: str
    reduce: Reduce
    meaning: str
    own_step: bool = False


_MEAN, _RATE, _LAST, _SUM, _MAX = Reduce

CATALOGUE: tuple[MetricInfo, ...] = (
    MetricInfo("train/loss", "nats/token", _MEAN, "Training loss of the update, as normalised."),
    MetricInfo("train/row_loss_max", "nats/token", _MAX, "Largest mean loss of one row."),
    MetricInfo("train/skipped_steps", "steps", _LAST, "Updates not applied so far (not finite)."),
    MetricInfo("eval/loss", "nats/token", _LAST, "Loss on the held-out rows.", own_step=True),
    MetricInfo("grad_norm", "", _MEAN, "Norm of the whole gradient before clipping."),
    MetricInfo("learning_rate", "", _LAST, "Learning rate that the update used."),
    MetricInfo("epoch", "epochs", _LAST, "Passes over the data so far, with the part of this one."),
    MetricInfo("num_tokens", "tokens", _LAST, "Tokens processed so far, trained and context."),
    MetricInfo("time/step", "s", _MEAN, "Time of one update, waiting for data included."),
    MetricInfo("time/data_wait", "s", _MEAN, "Time an update waited for its rows."),
    MetricInfo("time/eval", "s", _SUM, "Time spent evaluating."),
    MetricInfo("time/checkpoint", "s", _SUM, "Time spent saving checkpoints."),
    MetricInfo("throughput/tokens_per_s", "tokens/s", _RATE, "Tokens processed per second."),
    MetricInfo(
        "throughput/trained_tokens_per_s", "tokens/s", _RATE, "Tokens with a loss per second."
    ),
    MetricInfo("data/packing_fill", "share", _MEAN, "Share of the micro-batches that is filled."),
    MetricInfo("data/trained_share", "share", _MEAN, "Share of the tokens that has a loss."),
    MetricInfo("data/rows", "rows", _SUM, "Rows that were processed."),
    MetricInfo("data/micro_batches", "batches", _MEAN, "Micro-batches of one update."),
    MetricInfo(
        "memory/max_alloc",
        "bytes",
        _MAX,
        "Peak of device memory held by tensors; on a CPU, of the process.",
    ),
    MetricInfo("memory/max_reserved", "bytes", _MAX, "Peak of device memory held by torch."),
    MetricInfo("memory/host_rss", "bytes", _LAST, "Host memory held by this process."),
    MetricInfo("gpu/<i>/memory_used", "bytes", _LAST, "Memory in use on device i, all processes."),
    MetricInfo("gpu/<i>/utilization", "share", _MEAN, "Share of time that device i was busy."),
    MetricInfo("gpu/<i>/temperature", "C", _MAX, "Temperature of device i."),
)

_EXACT = {info.name: info for info in CATALOGUE if "<i>" not in info.name}
_PATTERNS = {
    re.compile(re.escape(info.name).replace("<i>", r"(?:0|[1-9]\d*)")): info
    for info in CATALOGUE
    if "<i>" in info.name
}


def describe(name: str) -> MetricInfo | None:
    """The catalogue's line for a metric name, or None when it has none."""
    if name in _EXACT:
        return _EXACT[name]
    return next((info for pattern, info in _PATTERNS.items() if pattern.fullmatch(name)), None)
