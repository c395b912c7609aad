"""The specification of a group of workers, whatever starts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from homeostat.config.cluster import WorkerKind
from homeostat.observe.timeline import OnSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """The workers of a group: what each of them builds, and how long that may take.

    Every rank calls `factory` (see context.py) with `kwargs` and, on top, its entry of `per_rank`.
    `env` is added to the environment of their processes, whose output goes to `log_file`. Each of
    them uses `num_gpus` GPUs, which a launcher that places workers reserves.
    """

    factory: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    kind: WorkerKind
    name: str
    log_file: Path
    size: int = 1
    num_gpus: int = 0
    per_rank: Sequence[Mapping[str, Any]] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    # Called after each call: the worker's name ("trainer 0"), what it did, from when to when.
    on_span: OnSpan | None = None
    start_timeout_s: float = 300.0
    close_timeout_s: float = 30.0

    def kwargs_of_ranks(self) -> list[dict[str, Any]]:
        """Return the arguments of each rank's factory."""
        own = self.per_rank or [{}] * self.size
        assert len(own) == self.size, f"{self.name}: {self.size} ranks, not {len(own)}"
        return [{**self.kwargs, **mine} for mine in own]
