"""Log to Weights & Biases, online or offline, with all files inside the run directory.

The W&B run id is stored in the run directory, so that a resumed run continues the same W&B run.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from homeostat.config.observe import WandbSink as WandbConfig
from homeostat.errors import ConfigError, MissingDependencyError, Problem
from homeostat.observe.durable import write_atomically
from homeostat.observe.sinks.base import SentMark, SinkContext


class WandbSink:
    """Send records to a W&B run."""

    name = "W&B"

    def __init__(self, config: WandbConfig, context: SinkContext) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingDependencyError.of(
                "wandb", extra="wandb", needed_for="observe.sinks: wandb"
            ) from None
        self.run_id = _run_id(config, context)
        self._sent = SentMark(
            context.run_dir.sinks / f"wandb_{self.run_id}.step",
            service=self.name,
            resumed_from=context.resumed_from,
        )
        options: dict[str, Any] = {"resume": "allow"} if config.mode == "online" else {}
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=config.name or context.run_name,
                id=self.run_id,
                mode=config.mode,
                dir=str(context.run_dir.path),
                # We save the console ourselves; W&B's capture would break the live view.
                settings=wandb.Settings(console="off", silent=True),
                **options,
            )
        except (wandb.Error, OSError, ValueError) as error:
            raise ConfigError([_cannot_start(error)]) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._sent.is_new(step):
            self._run.log(dict(metrics), step=step)
            self._sent.move_to(step)

    def close(self) -> None:
        self._run.finish()


def _run_id(config: WandbConfig, context: SinkContext) -> str:
    """Return the id of the recipe, or the stored one of this run directory, or a new one."""
    path = context.run_dir.sinks / "wandb_run_id"
    is_resumed = context.resumed_from is not None
    kept = path.read_text().strip() if is_resumed and path.is_file() else ""
    run_id = config.run_id or kept or uuid.uuid4().hex[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{run_id}\n")
    return run_id


def _cannot_start(error: Exception) -> Problem:
    return Problem(
        "observe.sinks",
        f"W&B did not start: {error}.",
        "Log in with `wandb login`, set mode: offline and sync later, or remove the sink.",
    )
