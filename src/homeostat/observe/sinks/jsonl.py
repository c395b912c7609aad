"""The sink metrics.jsonl, which every run has and which needs no package."""

from __future__ import annotations

from collections.abc import Mapping

from homeostat.observe.run_dir import RunDir


class JsonlSink:
    """Append records to metrics.jsonl of the run directory."""

    name = "metrics.jsonl"

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run_dir.append_metrics(step, metrics)

    def close(self) -> None:
        """Do nothing: the file belongs to the run directory, which closes it."""
