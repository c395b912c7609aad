"""Keeps an engine sampling in a thread while its caller trains.

    submit(requests, take) -> thread: engine.poll, engine.poll, ... -> take(completion)
    quiesced(): nothing is in flight, and the engine is the caller's -> what was cut off continues

An engine in the caller's own process has no thread: it computes only while the caller waits.

Invariants: only one thread calls the engine at a time, and the caller has priority. The thread
calls the engine and `take`, never the trainer, so that it cannot issue a collective between two of
the trainer's. Each request is returned exactly once. Every wait ends: with its result, with the
thread's error, or with an error because the engine finished nothing for `stall_s`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace

from homeostat.errors import EngineError
from homeostat.rollout.engine import Engine, Request
from homeostat.types import Completion

# Duration of one poll by the thread. A caller who wants the engine waits until the poll ends.
SLICE_SECONDS = 0.2
# Time limit for the thread to end: one poll, plus the time that a remote engine allows for a late
# reply.
JOIN_SECONDS = 15.0

Take = Callable[[Completion], None]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Awaited:
    """An in-flight request. If it is `whole`, it is never interrupted: it finishes with the weights
    with which it began.
    """

    request: Request
    take: Take
    whole: bool


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of sampling, and seconds that `quiesced` waited for in-flight requests."""

    busy_s: float = 0.0
    drain_s: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.busy_s + other.busy_s, self.drain_s + other.drain_s)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.busy_s - other.busy_s, self.drain_s - other.drain_s)


class Background:
    """Samples from one engine in the background. Close it before you close the engine.

    With `interrupts`, `quiesced` interrupts in-flight requests, and they continue from their tokens
    afterwards. Without it, `quiesced` waits until they are finished.
    """

    def __init__(self, engine: Engine, *, stall_s: float, interrupts: bool) -> None:
        self.engine = engine
        self.stall_s = stall_s
        self.interrupts = interrupts
        self.spent = Spent()
        # Held while the engine is called. _claims counts the callers that wait for it, without the
        # thread.
        self._turn = threading.RLock()
        self._claims = 0
        self._changed = threading.Condition()
        self._awaited: dict[str, _Awaited] = {}
        self._last_sign = time.monotonic()
        self._is_closed = False
        self._executor: ThreadPoolExecutor | None = None
        # The error that ended the thread.
        self._thread: Future[None] | None = None
        if engine.capabilities.own_process:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="sampling")
            self._thread = self._executor.submit(self._run)

    def submit(self, requests: Iterable[Request], take: Take, *, whole: bool = False) -> None:
        """Queue requests. The sampling thread calls `take` with each completion."""
        with self._exclusively():
            for request in requests:
                self._awaited[request.id] = _Awaited(request, take, whole)
                self.engine.submit(request)

    @property
    def num_in_flight(self) -> int:
        return len(self._awaited)

    def begun(self, id: str) -> Request | None:
        """Return an in-flight request, with the tokens that it had when it was last interrupted."""
        found = self._awaited.get(id)
        return None if found is None else found.request

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until a condition holds. It is evaluated again after every completion."""
        while not is_done():
            if self._thread is None:
                with self._exclusively():
                    self._poll()
            else:
                with self._changed:
                    self._changed.wait_for(is_done, timeout=SLICE_SECONDS)
            self._require_sound()

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Yield the engine to the caller while its requests stay in flight."""
        with self._exclusively():
            yield

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """Yield the engine without in-flight requests, so that the caller can load new weights.

        When the block ends without an error, interrupted requests continue from their tokens.
        """
        started = time.monotonic()
        self.wait(lambda: not any(self._drained()))
        self.spent += Spent(drain_s=time.monotonic() - started)
        with self._exclusively():
            cut_off = self._cut_off() if self.interrupts else []
            yield
            for request in cut_off:
                self.engine.submit(request)

    def close(self) -> None:
        """End the thread and discard in-flight requests. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._awaited.clear()
            self._changed.notify_all()
        if self._executor is not None and self._thread is not None:
            wait([self._thread], timeout=JOIN_SECONDS)
            if not self._thread.done():
                log.warning("the sampling thread is still at the engine, which is closed now")
            self._executor.shutdown(wait=False)

    def _drained(self) -> Iterator[_Awaited]:
        """Yield the requests that must end before the weights change."""
        awaited = list(self._awaited.values())
        return (one for one in awaited if one.whole or not self.interrupts)

    def _cut_off(self) -> list[Request]:
        """Abort all in-flight requests, and return requests that continue them."""
        continued = []
        for completion in self.engine.abort():
            found = self._awaited[completion.request_id]
            found.request = replace(
                found.request,
                begun=completion.segments,
                prompt_columns=completion.prompt_columns,
            )
            continued.append(found.request)
        # In the order of submission, so that requests admitted first are served first.
        places = {id: place for place, id in enumerate(self._awaited)}
        return sorted(continued, key=lambda request: places[request.id])

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        with self._changed:
            self._claims += 1
        try:
            with self._turn:
                yield
        finally:
            with self._changed:
                self._claims -= 1
                self._last_sign = time.monotonic()
                self._changed.notify_all()

    def _run(self) -> None:
        """Poll the engine while there are in-flight requests and no caller waits. Runs in the
        thread.
        """
        while True:
            with self._changed:
                self._changed.wait_for(self._may_poll)
                if self._is_closed:
                    return
            with self._turn:
                self._poll()

    def _may_poll(self) -> bool:
        return self._is_closed or (bool(self._awaited) and not self._claims)

    def _poll(self) -> None:
        started = time.monotonic()
        finished = self.engine.poll(timeout_s=SLICE_SECONDS)
        self.spent += Spent(busy_s=time.monotonic() - started)
        self._hand_out(finished)

    def _hand_out(self, finished: Sequence[Completion]) -> None:
        for completion in finished:
            found = self._awaited.get(completion.request_id)
            if found is None:
                # Closed meanwhile.
                continue
            # `take` comes first, so that a completion that is no longer awaited can always be
            # found.
            found.take(completion)
            with self._changed:
                self._awaited.pop(completion.request_id, None)
                self._last_sign = time.monotonic()
                self._changed.notify_all()

    def _require_sound(self) -> None:
        """Raise the thread's error if there is one, or EngineError if the engine is stuck."""
        if self._thread is not None and self._thread.done():
            self._thread.result()
        waited_s = time.monotonic() - self._last_sign
        if not self._awaited or waited_s < self.stall_s:
            return
        with self._exclusively():
            why = self.engine.health() or (
                f"waited {waited_s:.0f} s; where it needs longer, raise engine.stall_s"
            )
        raise EngineError(
            f"the {self.engine.capabilities.name} engine finished none of {len(self._awaited)} "
            f"requests ({next(iter(self._awaited))} and others): {why}."
        )
