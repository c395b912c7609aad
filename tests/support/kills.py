"""Ends the engine's process as the system would: by SIGKILL, at a moment that a test chooses."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from homeostat.rollout.remote import RemoteEngine


def children_of(pid: int) -> list[int]:
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in file.read_text().split()]
    return found


def engine_process() -> int | None:
    """The engine's worker: the child of a child of ours that runs workers/child.py, the one that
    was started last, for other tests may keep theirs."""
    found: dict[int, int] = {}
    for child in children_of(os.getpid()):
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"homeostat.workers.child" in command and (workers := children_of(child)):
            started = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[19]
            found[int(started)] = workers[0]
    return found[max(found)] if found else None


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
