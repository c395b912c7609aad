"""The controller's end of one rank: a channel to its worker, and one to its guardian.

    ask -> outbox -> [sender thread] -> worker -> [reader thread] -> Pending
                                      guardian -> [watcher thread] -> on_end(link)

`ask` never waits for a busy worker, and answers are read while calls are being sent, so that full
channels in both directions cannot block each other. Only the guardian reports how a rank ended, and
only once. Before that it reports on request what the rank is doing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from homeostat.errors import WorkerError
from homeostat.observe.timeline import OnSpan
from homeostat.workers.channel import Channel, ChannelClosedError
from homeostat.workers.child import REPORT
from homeostat.workers.group import Pending
from homeostat.workers.hosting import Failure
from homeostat.workers.log import WorkerLog
from homeostat.workers.reports import WorkerReport
from homeostat.workers.wire import pack, unpack


class RankLink:
    """Sends calls to one rank, and receives its answers and the report of its end.

    `kill` ends its processes without their help: for when the guardian is gone or stuck, and cannot
    pass anything on.
    """

    def __init__(
        self,
        rank: int,
        *,
        worker: Channel,
        guardian: Channel,
        kill: Callable[[], None],
        log: WorkerLog,
    ) -> None:
        self.rank = rank
        self.log = log
        # Set when the process is gone; `exit_code` is None if nobody could tell.
        self.ended = threading.Event()
        self.exit_code: int | None = None
        self._worker = worker
        self._guardian = guardian
        self.kill = kill
        self._reports: SimpleQueue[WorkerReport] = SimpleQueue()
        self._outbox: SimpleQueue[tuple[bytes, bytes] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending: dict[int, Pending[Any]] = {}
        self._num_calls = 0
        self._refusal: WorkerError | None = None
        self._last_answer_at = 0.0
        self.on_span: OnSpan | None = None

    def start(self, *, on_end: Callable[[RankLink], None], hold_back: Callable[[], None]) -> None:
        """Start the threads. `hold_back` runs before a failure is reported: see ProcessGroup."""
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
                raise _copy_of(self._refusal)
            self._num_calls += 1
            self._pending[self._num_calls] = pending
            self._outbox.put((pack((self._num_calls, method)), body))
        return pending

    def refuse(self, why: WorkerError) -> None:
        """Fail all pending calls and all later ones."""
        with self._lock:
            self._refusal = why
            failed, self._pending = self._pending, {}
        for pending in failed.values():
            pending.fail(_copy_of(why))

    @property
    def is_awaited(self) -> bool:
        """Return whether some call has no answer yet."""
        with self._lock:
            return bool(self._pending)

    def overdue(self) -> list[Pending[Any]]:
        """Return calls whose wait timed out and that still have no answer."""
        with self._lock:
            return [one for one in self._pending.values() if one.overdue_s is not None]

    def signal(self, number: int) -> None:
        """Send the worker a signal through its guardian, which knows whether the pid is still the
        worker's.
        """
        with contextlib.suppress(ChannelClosedError):
            self._guardian.send(pack(number))

    def ask_for_report(self) -> None:
        """Ask the guardian what the worker is doing; `report` returns the answer."""
        with contextlib.suppress(ChannelClosedError):
            self._guardian.send(pack(REPORT))

    def report(self, *, timeout_s: float) -> WorkerReport | None:
        """Return the guardian's answer; None if it is dead, stuck or stopped."""
        try:
            return self._reports.get(timeout=timeout_s)
        except Empty:
            return None

    def hang_up(self) -> None:
        self._outbox.put(None)

    def _send_all(self) -> None:
        with contextlib.suppress(ChannelClosedError):
            while (message := self._outbox.get()) is not None:
                header, body = message
                self._worker.send(header)
                self._worker.send(body)
                # Keep no large object while there is nothing to send.
                del message, body

    def _read_all(self, hold_back: Callable[[], None]) -> None:
        with contextlib.suppress(ChannelClosedError):
            while True:
                call_id, is_good = unpack(self._worker.receive())
                self._deliver(call_id, is_good, self._worker.receive(), hold_back)

    def _deliver(
        self, call_id: int, is_good: bool, body: bytes, hold_back: Callable[[], None]
    ) -> None:
        if not is_good:
            hold_back()
        with self._lock:
            pending = self._pending.pop(call_id, None)
        if pending is None:
            return
        self._note_span(pending)
        if is_good:
            pending.settle_packed(body)
        else:
            failure: Failure = unpack(body)
            pending.fail(failure.error(f"{pending.group} rank {self.rank}: {pending.method!r}"))

    def _note_span(self, pending: Pending[Any]) -> None:
        """A worker begins a call when it has answered the one before."""
        began, ended = max(pending.asked_at, self._last_answer_at), time.monotonic()
        self._last_answer_at = ended
        if self.on_span is not None:
            row = f"{pending.group} {self.rank}"
            self.on_span(row, pending.label.strip("()"), began=began, ended=ended)

    def _watch(self, on_end: Callable[[RankLink], None]) -> None:
        try:
            # A guardian on another machine sends the lines of the log, too.
            while not isinstance(said := unpack(self._guardian.receive()), int):
                if isinstance(said, bytes):
                    self.log.append(said)
                else:
                    self._reports.put(said)
            self.exit_code = said
        except ChannelClosedError:
            self.kill()
        self.ended.set()
        on_end(self)


def _copy_of(error: WorkerError) -> WorkerError:
    """Make an exception for one caller: each raise adds to its traceback."""
    return type(error)(str(error))
