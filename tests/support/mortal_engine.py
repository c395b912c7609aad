"""A native engine whose process ends itself by SIGKILL, at a moment that a plan names.

The plan is a JSON list in the file that MORTAL_PLAN names: one entry per process, in the order in
which they start. An entry is null (it lives), "load" (before the model is built), "built" (after
it), or a verb with the number of its fatal call ("apply 2"), at which it is only stopped if
"stop" follows. "spawn" is for `killing_launcher`: the process dies before it has checked in.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import Popen
from typing import Any

from tests.support.forks import real_workers

from homeostat.workers.child import Ticket
from homeostat.workers.context import WorkerContext

PLAN = "MORTAL_PLAN"
FACTORY = f"{__name__}:build_engine"
LAST_WORDS = "this process is about to end at"


def build_engine(context: WorkerContext, **kwargs: Any) -> Any:
    moment = _next_moment()
    if moment == "load":
        _end(moment)
    # Only now: a process that dies above has not imported torch, and costs little.
    from homeostat.rollout.native.host import build_engine as build

    engine = build(context, **kwargs)
    if moment == "built":
        _end(moment)
    if moment is not None:
        verb, call = moment.split()[:2]
        setattr(engine, verb, _fatal(getattr(engine, verb), moment, at=int(call)))
    return engine


def killing_launcher(plain: Callable[..., list[Popen[bytes]]]) -> Callable[..., list[Popen[bytes]]]:
    """A launcher whose processes die at once where the plan says "spawn"."""

    def launch(ticket: Ticket, *, env: Mapping[str, str], folder: Path) -> list[Popen[bytes]]:
        if ticket.group_name in ("engine", "helper1") and _peek() == "spawn":
            _next_moment()
            # A real start: a forked worker might check in first.
            with real_workers():
                started = plain(ticket, env=env, folder=folder)
            for process in started:
                process.kill()
            return started
        return plain(ticket, env=env, folder=folder)

    return launch


def write_plan(file: Path, moments: list[str | None]) -> Path:
    file.write_text(json.dumps(moments))
    return file


def _fatal(plain: Callable[..., Any], moment: str, *, at: int) -> Callable[..., Any]:
    calls = 0

    def verb(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            _end(moment)
        return plain(*args, **kwargs)

    return verb


def _peek() -> str | None:
    return json.loads(Path(os.environ[PLAN]).read_text())[0]


def _next_moment() -> str | None:
    """Take the first entry from the plan. Processes start one after another."""
    file = Path(os.environ[PLAN])
    moment, *rest = json.loads(file.read_text())
    file.write_text(json.dumps(rest))
    return moment


def _end(moment: str) -> None:
    print(LAST_WORDS, moment, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP if moment.endswith(" stop") else signal.SIGKILL)
