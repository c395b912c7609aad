"""The controller's end of one rank: a line to its worker, and one to its guardian.

    ask -> outbox -> [sender thread] -> worker -> [reader thread] -> Pending
                                      guardian -> [watcher thread] -> on_end(link)

`ask` never waits for a worker that is busy, and answers are read whatever is being sent, so that
full sockets in both directions cannot block each other. How a rank ended is told by its guardian
alone, and only once.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from homeostat.errors import WorkerError
from homeostat.workers.group import Pending
from homeostat.workers.hosting import Failure
from homeostat.workers.log import WorkerLog


@dataclass(frozen=True, slots=True)
class Line:
    """A connection to a process."""

    connection: Connection
    pid: int


class RankLink:
    """Calls to one rank, its answers, its end."""

    def __init__(self, rank: int, *, worker: Line, guardian: Line, log: WorkerLog) -> None:
        self.rank = rank
        self.log = log
        # Set when the process is gone; `exit_code` is None if nobody could tell.
        self.ended = threading.Event()
        self.exit_code: int | None = None
        self._worker = worker
        self._guardian = guardian
        self._outbox: SimpleQueue[tuple[bytes, bytes] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending: dict[int, Pending[Any]] = {}
        self._num_calls = 0
        self._refusal: WorkerError | None = None

    def start(self, *, on_end: Callable[[RankLink], None], hold_back: Callable[[], None]) -> None:
        """`hold_back` runs before a failure is told: see ProcessGroup."""
        for target, args in (
            (self._send_all, ()),
            (self._read_all, (hold_back,)),
            (self._watch, (on_end,)),
        ):
            threading.Thread(target=target, args=args, daemon=True).start()

    def ask(self, method: str, body: bytes) -> Pending[Any]:
        name, rank = self.log.group_name, self.rank
        pending = Pending(name, rank, method, last_words=lambda: self.log.last_words(rank))
        with self._lock:
            if self._refusal is not None:
                raise type(self._refusal)(str(self._refusal))
            self._num_calls += 1
            self._pending[self._num_calls] = pending
            self._outbox.put((pickle.dumps((self._num_calls, method)), body))
        return pending

    def refuse(self, why: WorkerError) -> None:
        """Fail what is pending and whatever is asked from now on."""
        with self._lock:
            self._refusal = why
            failed, self._pending = self._pending, {}
        for pending in failed.values():
            pending.fail(type(why)(str(why)))

    @property
    def is_awaited(self) -> bool:
        """Some call has no answer yet."""
        with self._lock:
            return bool(self._pending)

    def overdue(self) -> list[Pending[Any]]:
        """Calls whose answer was awaited in vain, and is still not there."""
        with self._lock:
            return [one for one in self._pending.values() if one.overdue_s is not None]

    def signal(self, number: int) -> None:
        """By way of the guardian, who knows whether the worker still has this pid."""
        with contextlib.suppress(OSError):
            self._guardian.connection.send_bytes(pickle.dumps(number))

    def kill_outright(self) -> None:
        """For when the guardian is gone or stuck: it cannot pass anything on."""
        for pid in (self._worker.pid, self._guardian.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def hang_up(self) -> None:
        self._outbox.put(None)

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                header, body = message
                self._worker.connection.send_bytes(header)
                self._worker.connection.send_bytes(body)
                # Nothing large is kept while there is nothing to send.
                del message, body

    def _read_all(self, hold_back: Callable[[], None]) -> None:
        line = self._worker.connection
        with contextlib.suppress(EOFError, OSError):
            while True:
                call_id, is_good = pickle.loads(line.recv_bytes())
                self._deliver(call_id, is_good, line.recv_bytes(), hold_back)

    def _deliver(
        self, call_id: int, is_good: bool, body: bytes, hold_back: Callable[[], None]
    ) -> None:
        if not is_good:
            hold_back()
        with self._lock:
            pending = self._pending.pop(call_id, None)
        if pending is None:
            return
        if is_good:
            pending.settle_packed(body)
        else:
            failure: Failure = pickle.loads(body)
            pending.fail(failure.error(f"{pending.group} rank {self.rank}: {pending.method!r}"))

    def _watch(self, on_end: Callable[[RankLink], None]) -> None:
        try:
            self.exit_code = pickle.loads(self._guardian.connection.recv_bytes())
        except (EOFError, OSError):
            self.kill_outright()
        self.ended.set()
        on_end(self)
