"""Run one job of the clinic in its own process: `python -m homeostat.clinic.patient JOB`.

JOB is the JSON text of a Job. The exit code is that of `homeostat train`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from homeostat.clinic.catalogue import HEALTHY, INJECTORS
from homeostat.clinic.job import Job, Kind
from homeostat.clinic.recipes import Body, Raw, put
from homeostat.config.loading.load import build_config
from homeostat.errors import HomeostatError
from homeostat.observe.safe_text import safe_text
from homeostat.observe.terminal import SafeConsole
from homeostat.run.calling.start import train_recipe
from homeostat.run.session.session import open_session
from homeostat.run.wiring.hooks import NO_HOOKS, Hooks


def main(job: Job) -> int:
    """Run the job and return the exit code of the last call."""
    folder = Path(job.folder)
    if job.kind is Kind.BASE:
        assert job.base is not None, job
        return _train(job.base.recipe(folder), NO_HOOKS)
    if job.kind is Kind.HEALTHY:
        body = HEALTHY[job.name]
        raw = _recipe(job, body)
        if body.stops_at is not None:
            _train(raw, StopsAt(body.stops_at))
        return _train(raw, NO_HOOKS)
    fault = INJECTORS[job.name]
    injector = fault(fault.dosed(job.seed))
    raw = _recipe(job, fault.body)
    injector.prepare(raw, folder)
    code = _train(raw, injector)
    for _ in range(1, fault.num_calls):
        injector.between_calls(job.run_dir)
        code = _train(raw, injector)
    return code


class StopsAt(Hooks):
    """Asks the run to stop after a step, as a scheduler does with SIGTERM."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, step: int, parts: object) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def _recipe(job: Job, body: Body) -> Raw:
    raw = body.recipe(Path(job.folder), bases=Path(job.bases), seed=job.seed)
    put(raw, "health.heal", job.heal)
    return raw


def _train(raw: Raw, hooks: Hooks) -> int:
    try:
        config = build_config(raw, [], file=None)
        with open_session(
            config,
            recipe=json.dumps(raw, indent=2),
            command=["homeostat", "train", "recipe.yaml"],
            console=SafeConsole(file=sys.stderr),
            log_level="info",
        ) as session:
            train_recipe(config, session, hooks)
    except HomeostatError as error:
        print(f"error: {safe_text(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Job.from_json(sys.argv[1])))
