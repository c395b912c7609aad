"""The blows of bench/ray_chaos.py, struck from within the driver of a run. Linux only.

A Blow falls when its phase comes at its step, once in the whole life of a run: a note in a file
says that it has fallen.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from victims import MARK, pairs, worker_pids

VICTIMS = ("driver", "rank", "engine", "reward", "actor")
PHASES = ("start", "generate", "reward", "train", "publish", "checkpoint")
SIGNALS = ("KILL", "STOP")
# The step at which a run is disturbed: one checkpoint lies behind it, one comes with it.
STEP = 2
# How long a victim is waited for, which may not have been started yet.
FIND_S = 180.0


@dataclass(frozen=True, slots=True)
class Blow:
    """One process of a run is lost: which, in which phase, by which signal."""

    victim: str
    phase: str
    signal: str

    @classmethod
    def of(cls, text: str) -> Blow:
        return cls(*text.split(":"))

    def __str__(self) -> str:
        return f"{self.victim}:{self.phase}:{self.signal}"


def disturb(blow: Blow, note: Path, run: Callable[[], None]) -> None:
    """Run the driver. The blow falls when its phase comes at its step, once in the whole run."""
    from homeostat.observe.timeline import Timeline
    from homeostat.rollout.scorer import Scorer
    from homeostat.run.wiring import rl_setup

    now = {"step": 0}
    phase, begin, open_engine = Timeline.phase, Scorer.begin, rl_setup.open_engine

    @contextmanager
    def timed(self: Timeline, name: str, *, step: int) -> Iterator[None]:
        now["step"] = step
        word = "generate" if name.startswith("generate") else name
        if step == STEP and word == blow.phase:
            strike(blow, note)
        with phase(self, name, step=step):
            yield

    def scored(self: Scorer, *args: Any, **kwargs: Any) -> Any:
        if now["step"] == STEP and blow.phase == "reward":
            strike(blow, note)
        return begin(self, *args, **kwargs)

    def opened(*args: Any, **kwargs: Any) -> Any:
        if blow.phase == "start":
            threading.Thread(target=strike, args=(blow, note), daemon=True).start()
        return open_engine(*args, **kwargs)

    Timeline.phase, Scorer.begin, rl_setup.open_engine = timed, scored, opened
    run()


def strike(blow: Blow, note: Path) -> None:
    """Send the signal as soon as the victim is there, unless it was sent before."""
    end = time.monotonic() + FIND_S
    while not note.exists() and time.monotonic() < end:
        pid = find(blow.victim)
        if pid is not None:
            note.write_text(str(time.time()))
            os.kill(pid, signal.Signals[f"SIG{blow.signal}"])
            return
        time.sleep(0.05)


def find(victim: str) -> int | None:
    """Return a process of this run."""
    main, mark = os.getpid(), os.environ[MARK]
    if victim == "driver":
        return main
    if victim == "reward":
        found = [pair.worker or pair.guardian for pair in pairs(main, "reward")]
    elif victim == "rank":
        found = [worker for _, worker in worker_pids(mark, "trainer")]
    elif victim == "engine":
        found = [worker for _, worker in worker_pids(mark, "engine")]
    else:
        found = [_parent(guardian) for guardian, _ in worker_pids(mark, "trainer")]
    return found[-1] if found else None


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
