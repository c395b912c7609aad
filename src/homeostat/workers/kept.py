"""A process that a Keeper started, followed by the controller like a process of this host."""

from __future__ import annotations

import signal as signals
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future

from homeostat.observe.exits import describe_exit
from homeostat.workers.log import WorkerLog


class KeptProcess:
    """A `workers.launchers.Process` that runs under a Keeper.

    `watched` is the answer of `Keeper.watch`, and fails if the Keeper is lost: its process counts
    as killed then. `signal` has the Keeper send a signal. `name` and `keeper` are for messages.
    """

    def __init__(
        self,
        watched: Future[tuple[int, bytes]],
        *,
        signal: Callable[[int], object],
        name: str,
        keeper: str,
        log: WorkerLog,
    ) -> None:
        self._signal = signal
        self._name = name
        self._keeper = keeper
        self._log = log
        self._loss: str | None = None
        self._code: int | None = None
        self._ended = threading.Event()
        watched.add_done_callback(self._on_end)

    def __str__(self) -> str:
        return self._name

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self), timeout or 0.0)
        assert self._code is not None
        return self._code

    def send_signal(self, sig: int, /) -> None:
        if not self._ended.is_set():
            self._signal(int(sig))

    @property
    def keeper_is_gone(self) -> bool:
        return self._loss is not None

    def describe_end(self) -> str:
        """Return how it ended, for a message that names the group."""
        return self._loss or f"{self} {describe_exit(self._code)}."

    def _on_end(self, answer: Future[tuple[int, bytes]]) -> None:
        error = answer.exception()
        if error is None:
            code, output = answer.result()
        else:
            self._loss = f"{self._keeper} is gone: {self._reason(error)}"
            code, output = -signals.SIGKILL, f"{self._loss}\n".encode()
        self._log.append(output)
        self._code = code
        self._ended.set()

    def _reason(self, error: BaseException) -> str:
        return str(error)
