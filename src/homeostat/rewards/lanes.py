"""A crew of reward workers, and the thread that keeps it busy."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from homeostat.observe.timeline import OnSpan
from homeostat.rewards.crews import Crew
from homeostat.rewards.requests import Request
from homeostat.rewards.workers import RewardWorkers


class Lane:
    """Hands requests to the workers of a crew, in a thread. To be used in a with statement."""

    def __init__(
        self,
        crew: Crew,
        *,
        log_file: Path | None,
        cache: Path | None,
        noun: str,
        on_span: OnSpan | None = None,
    ) -> None:
        self.labels = [reward.label for reward in crew.rewards]
        self._holds_back = crew.gathers == "round"
        self.workers = RewardWorkers(
            crew, log_file=log_file, cache=cache, noun=noun, on_span=on_span
        )
        self._opened = ExitStack()
        self._thread: Future[None] | None = None
        # Requests that are held back until somebody waits for a result.
        self._held: list[Request] = []
        # Groups may be submitted by one thread and waited for by another.
        self._lock = threading.Lock()
        # Requests that the thread has not taken yet. A byte sent into the bell wakes it.
        self._submitted: deque[list[Request]] = deque()
        self._bell: socket.socket | None = None
        self._is_closing = False

    @property
    def thread(self) -> Future[None]:
        """Return the thread's end."""
        assert self._thread is not None, "a RewardPool has workers inside its with statement only"
        return self._thread

    def __enter__(self) -> Lane:
        with ExitStack() as stack:
            stack.callback(self.workers.close)
            self.workers.start()
            self._bell, wake = map(stack.enter_context, socket.socketpair())
            executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="rewards"))
            stack.callback(self._end_thread)
            self._thread = executor.submit(self._work, wake)
            self._opened = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.close()

    def submit(self, request: Request) -> None:
        """Have a request computed; a crew that gathers rounds waits for `release`."""
        assert self._thread is not None, "a RewardPool has workers inside its with statement only"
        if self._holds_back:
            with self._lock:
                self._held.append(request)
        else:
            self._submitted.append([request])
            self._ring()

    def release(self) -> None:
        """Hand over all that was held back, at one moment."""
        with self._lock:
            held, self._held = self._held, []
        if held:
            self._submitted.append(held)
            self._ring()

    def _end_thread(self) -> None:
        self._is_closing = True
        self._ring()

    def _ring(self) -> None:
        assert self._bell is not None, "a RewardPool has a thread inside its with statement only"
        # If the buffer is full, a byte that will wake the thread is already there. Waiting for room
        # would wait for ever if an error has ended the thread.
        with contextlib.suppress(BlockingIOError):
            self._bell.send(b"!", socket.MSG_DONTWAIT)

    def _work(self, wake: socket.socket) -> None:
        """Run by the thread: give work to the processes until the pool is closed."""
        waiting: deque[Request] = deque()
        while not self._is_closing:
            if waiting or self.workers.is_busy:
                self.workers.turn(waiting, wake=wake)
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096, socket.MSG_DONTWAIT)
            else:
                wake.recv(4096)
            while self._submitted:
                waiting.extend(self._submitted.popleft())
