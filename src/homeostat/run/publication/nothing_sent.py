"""Publication without sending: the engine shares the trainer's weights, or there is no engine."""

from __future__ import annotations

import shutil
from pathlib import Path

from homeostat.rollout.engine import Engine, Quiesce
from homeostat.train.saving.run_state import RlState

# The file of a checkpoint with the weights of an engine that was behind the trainer.
PUBLISHED = "published.safetensors"


class NoEngine:
    """Publishes nothing, for a run that samples nothing. Weights of an engine that was behind are
    copied from `checkpoint` to the next one."""

    state_bytes = 0

    def __init__(self, checkpoint: Path | None, *, rl_state: RlState) -> None:
        self.published = None if checkpoint is None else checkpoint / PUBLISHED
        self.rl_state = rl_state

    def make_room(self) -> None:
        """Do nothing: no staging memory is needed."""

    def stage(self, step: int, *, must: bool) -> None:
        """Do nothing: no weights are sent."""

    def publish(self, step: int, *, must: bool) -> dict[str, float]:
        self.rl_state.published_version = step
        self.published = None
        return {}

    def follow_precision(self) -> None:
        """Do nothing: no weights are sent."""

    def save(self, folder: Path) -> None:
        if self.published is not None and self.published.is_file():
            shutil.copyfile(self.published, folder / PUBLISHED)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class SharedWeights:
    """Publishes to an engine that computes with the trainer's own tensors."""

    state_bytes = 0

    def __init__(self, engine: Engine, *, sleeps: bool, rl_state: RlState) -> None:
        self.engine = engine
        self.sleeps = sleeps
        self.rl_state = rl_state

    def make_room(self) -> None:
        """Sampling has ended: the weights may change, and the cache may be freed."""
        self.engine.begin_update(Quiesce.DRAIN)
        if self.sleeps:
            self.engine.sleep()

    def stage(self, step: int, *, must: bool) -> None:
        """Do nothing: no weights are sent."""

    def publish(self, step: int, *, must: bool) -> dict[str, float]:
        """After the updates of a step. Returns metrics, where anything was sent."""
        self.engine.commit(step)
        self.rl_state.published_version = step
        return {}

    def follow_precision(self) -> None:
        """Do nothing: the engine computes with the trainer's rounded copies."""

    def save(self, folder: Path) -> None:
        """The trainer's weights are the engine's."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""
