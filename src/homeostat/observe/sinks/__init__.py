"""The sinks of metric records: metrics.jsonl always, and the services that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from homeostat.config.observe import AnySink
from homeostat.errors import ConfigError, HomeostatError, Problem
from homeostat.observe.run_dir import RunDir
from homeostat.observe.sinks.base import Sink, SinkContext, VendorGuard
from homeostat.observe.sinks.jsonl import JsonlSink
from homeostat.observe.sinks.tensorboard import TensorboardSink
from homeostat.observe.sinks.trackio import TrackioSink
from homeostat.observe.sinks.wandb import WandbSink

__all__ = ["Sink", "VendorGuard", "build_sinks"]

# The config's `type` -> sink. Each imports its vendor's package only when it is built.
SINKS: dict[str, Callable[[Any, SinkContext], Sink]] = {
    "tensorboard": TensorboardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}


def build_sinks(
    configs: Sequence[AnySink], run_dir: RunDir, *, run_name: str, resumed_from: int | None
) -> list[Sink]:
    """Build metrics.jsonl and the configured sinks. A sink that cannot start raises at once.

    `resumed_from` is the step from which the run is resumed; None for a new run.
    """
    sinks: list[Sink] = [JsonlSink(run_dir)]
    context = SinkContext(run_dir, run_name, resumed_from)
    sinks += [VendorGuard(_built(config, context)) for config in configs]
    return sinks


def _built(config: AnySink, context: SinkContext) -> Sink:
    try:
        return SINKS[config.type](config, context)
    except HomeostatError:
        raise
    except OSError as error:
        what = f"{config.type} did not start: {error}."
        hint = "Make the place writable, or remove the sink."
        raise ConfigError([Problem("observe.sinks", what, hint)]) from error
