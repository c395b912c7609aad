"""A logger backend for verl: `trainer.logger=["console","homeostat"]`.

verl's `Tracking` (verl/utils/tracking.py, the same in 0.8.0.dev of January 2026 and 0.10.0.dev of
August 2026) has a fixed list of backends and no hook for another one, so `install` adds one to that
class. verl imports the modules of the variable VERL_USE_EXTERNAL_MODULES in every process, also in
the Ray actor that logs:

    export VERL_USE_EXTERNAL_MODULES=homeostat.integrations.verl_plugin

The backend prints each finding when it appears, and appends it to `homeostat_findings.jsonl` in
`trainer.default_local_dir`. It cannot stop a run, because verl gives a logger no means to do so. If
you need that, start the run with
`homeostat watch --stop-on error -- python -m verl.trainer.main_ppo ...`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from homeostat.health.frameworks import ALL
from homeostat.health.readers.values.settings import flat
from homeostat.integrations.live import FINDINGS_FILE, Guard, LiveDoctor

BACKEND = "homeostat"


class HealthLogger:
    """The backend that verl's Tracking calls: `log` with a step's metrics, `finish` at the end."""

    def __init__(
        self, project_name: str, experiment_name: str, config: Mapping[str, Any] | None = None
    ) -> None:
        self._guard = Guard()
        self.doctor: LiveDoctor | None = None
        self._guard.call(self._begin, f"{project_name}/{experiment_name}", flat(config or {}))

    def _begin(self, run: str, settings: Mapping[str, Any]) -> None:
        folder = settings.get("trainer.default_local_dir") or "."
        steps = settings.get("trainer.total_training_steps")
        self.doctor = LiveDoctor(
            run=run,
            framework=ALL["verl"],
            settings=settings,
            total_steps=steps if type(steps) is int and steps > 0 else None,
            file=Path(str(folder)) / FINDINGS_FILE,
        )

    def log(self, data: Mapping[str, Any], step: int) -> None:
        if self.doctor is not None:
            self._guard.call(self.doctor.record, step, data)

    def finish(self) -> None:
        if self.doctor is not None:
            self._guard.call(self.doctor.close)


def install(tracking: Any = None) -> None:
    """Add the backend to verl's Tracking, or to the class that is given. Idempotent."""
    if tracking is None:
        tracking = importlib.import_module("verl.utils.tracking").Tracking
    if BACKEND in tracking.supported_backend:
        return
    tracking.supported_backend = [*tracking.supported_backend, BACKEND]
    begin = tracking.__init__

    def with_backend(
        self: Any,
        project_name: str,
        experiment_name: str,
        default_backend: str | list[str] = "console",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        begin(self, project_name, experiment_name, default_backend, config)
        named = [default_backend] if isinstance(default_backend, str) else default_backend
        if BACKEND in named:
            self.logger[BACKEND] = HealthLogger(project_name, experiment_name, config)

    tracking.__init__ = with_backend
