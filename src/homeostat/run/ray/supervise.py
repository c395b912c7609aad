"""Follow the end of an actor and of its process, as of a process of this host.

Ray tells of the death of an actor or its node by itself: nobody has to call the actor for it.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from concurrent.futures import Future
from typing import Any

from homeostat.observe.exits import describe_exit
from homeostat.run.ray.actors import Place
from homeostat.workers.log import WorkerLog


class ActorProcess:
    """A worker's process, which an actor has started; implements `workers.launchers.Process`.

    An actor that is gone cannot tell of its process, which counts as killed then.
    """

    def __init__(self, actor: Any, place: Place, *, rank: int, log: WorkerLog) -> None:
        self.actor = actor
        self.place = place
        self.rank = rank
        self._log = log
        self._death: str | None = None
        self._code: int | None = None
        self._ended = threading.Event()
        actor.watch.remote().future().add_done_callback(self._on_end)

    def __str__(self) -> str:
        return f"the process of rank {self.rank} on {self.place.address}"

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self), timeout or 0.0)
        assert self._code is not None
        return self._code

    def send_signal(self, sig: int, /) -> None:
        if not self._ended.is_set():
            self.actor.signal.remote(int(sig))

    @property
    def actor_is_gone(self) -> bool:
        return self._death is not None

    def describe_end(self) -> str:
        """Return how it ended, for a message that names the group."""
        return self._death or f"{self} {describe_exit(self._code)}."

    def _on_end(self, answer: Future[tuple[int, bytes]]) -> None:
        error = answer.exception()
        if error is None:
            code, output = answer.result()
        else:
            where = f"on {self.place.address}"
            self._death = f"the Ray actor of rank {self.rank} {where} is gone: {_reason(error)}"
            code, output = -signal.SIGKILL, f"{self._death}\n".encode()
        self._log.append(output)
        self._code = code
        self._ended.set()


def _reason(error: BaseException) -> str:
    """Return the first paragraph of Ray's message, which says why; the rest are ids."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("class_name:", "actor_id:", "pid:"))]
    return " ".join(said[:3]) or type(error).__name__
