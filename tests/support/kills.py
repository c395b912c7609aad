"""Ends the engine's process as the system would: by SIGKILL, at a moment that a test chooses."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import forks

from homeostat.rollout.remote import RemoteEngine


def children_of(pid: int) -> list[int]:
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in file.read_text().split()]
    return found


def engine_process() -> int | None:
    """The engine's worker: the child of the guardian that was started last, for other tests may
    keep theirs."""
    guardians = [worker.pid for worker in forks.WORKERS if worker.poll() is None]
    guardians += [
        child
        for child in children_of(os.getpid())
        if b"homeostat.workers.child" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    found = {_started(guardian): children_of(guardian) for guardian in guardians}
    workers = [found[start] for start in sorted(found) if found[start]]
    return workers[-1][0] if workers else None


def _started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def kill_engine() -> None:
    worker = engine_process()
    assert worker is not None, "there is no engine process"
    os.kill(worker, signal.SIGKILL)


def killed_at(verb: str, *, call: int, within_s: float) -> Callable[..., Any]:
    """The verb, at whose `call`-th call the engine is killed, a random moment later."""
    plain = getattr(RemoteEngine, verb)
    calls = 0

    def dying(self: RemoteEngine, *args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            threading.Timer(random.random() * within_s, kill_engine).start()
        return plain(self, *args, **named)

    return dying
