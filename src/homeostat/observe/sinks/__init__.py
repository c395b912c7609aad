"""Where metric records go: metrics.jsonl always, and the services a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from homeostat.config.observe import AnySink
from homeostat.observe.run_dir import RunDir
from homeostat.observe.sinks.base import Sink, SinkContext, VendorGuard
from homeostat.observe.sinks.jsonl import JsonlSink
from homeostat.observe.sinks.tensorboard import TensorboardSink
from homeostat.observe.sinks.trackio import TrackioSink
from homeostat.observe.sinks.wandb import WandbSink

__all__ = ["Sink", "VendorGuard", "build_sinks"]

# The config's `type` -> the sink. Each imports its vendor only when it is built.
SINKS: dict[str, Callable[[Any, SinkContext], Sink]] = {
    "tensorboard": TensorboardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}


def build_sinks(
    configs: Sequence[AnySink], run_dir: RunDir, *, run_name: str, resumed_from: int | None
) -> list[Sink]:
    """metrics.jsonl and the configured sinks. One that cannot start is an error here and now.

    `resumed_from` is the step the run continues from; None for a run that starts.
    """
    sinks: list[Sink] = [JsonlSink(run_dir)]
    context = SinkContext(run_dir, run_name, resumed_from)
    sinks += [VendorGuard(SINKS[config.type](config, context)) for config in configs]
    return sinks
