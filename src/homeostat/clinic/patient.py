"""One run of the clinic, in a process of its own: `python -m homeostat.clinic.patient JOB`.

JOB is the JSON text of a Job. The exit code is that of `homeostat train`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from homeostat.clinic.catalogue import HEALTHY, INJECTORS
from homeostat.clinic.injector import Cure, Injector
from homeostat.clinic.recipes import Base, Body, Raw, put
from homeostat.config.load import build_config
from homeostat.errors import HomeostatError
from homeostat.run import dispatch
from homeostat.run.hooks import NO_HOOKS, Hooks
from homeostat.run.session import open_session


@dataclass(frozen=True, slots=True)
class Job:
    """What to run: a healthy run or an injector by its name, or a base policy by its fields."""

    kind: str
    name: str
    seed: int
    folder: str
    bases: str
    heal: str = "off"
    base: tuple[str, int, int, tuple[int, ...]] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        raw = json.loads(text)
        if raw["base"] is not None:
            *rest, digits = raw["base"]
            raw["base"] = (*rest, tuple(digits))
        return cls(**raw)

    @property
    def run_dir(self) -> Path:
        return Path(self.folder) / "runs" / "run"


def run(job: Job) -> None:
    folder = Path(job.folder)
    if job.base is not None:
        return _train(Base(*job.base).recipe(folder), NO_HOOKS)
    if job.kind == "healthy":
        return _train(_recipe(job, HEALTHY[job.name]), NO_HOOKS)
    kind = INJECTORS[job.name]
    injector = kind(kind.dosed(job.seed))
    raw = _recipe(job, kind.body)
    injector.prepare(raw, folder)
    for call in range(kind.num_calls):
        if call:
            injector.between_calls(job.run_dir)
        _train(raw, injector, may_fail=call + 1 < kind.num_calls)


def _recipe(job: Job, body: Body) -> Raw:
    raw = body.recipe(Path(job.folder), bases=Path(job.bases), seed=job.seed)
    put(raw, "health.heal", job.heal)
    return raw


def _train(raw: Raw, hooks: Hooks, *, may_fail: bool = False) -> None:
    try:
        config = build_config(raw, [], file=None)
        with open_session(
            config,
            recipe=json.dumps(raw, indent=2),
            command=["homeostat", "clinic"],
            console=Console(file=sys.stderr),
            log_level="info",
        ) as session:
            dispatch.train(config, session, hooks)
    except HomeostatError as error:
        print(f"error: {error}", file=sys.stderr)
        if not may_fail:
            sys.exit(error.exit_code)


if __name__ == "__main__":
    run(Job.from_json(sys.argv[1]))
