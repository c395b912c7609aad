"""One thread that owns the engine, for servers whose requests arrive on many threads.

    submit(Request) -> Ticket.news() ... ;   call(function) -> its result, computed on the thread

Whatever goes wrong in the engine reaches every waiting caller as the same error; nobody waits for
an engine that is gone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from homeostat.errors import EngineError, HomeostatError
from homeostat.generation.streams import Progress, Streams
from homeostat.rollout.engine import Request
from homeostat.rollout.native.engine import NativeEngine

R = TypeVar("R")

# How long the engine computes before new requests are looked at.
_SLICE_S = 0.05
_IDLE_S = 1.0


class Ticket:
    """What a caller holds of a request."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._news: queue.SimpleQueue[Progress | HomeostatError] = queue.SimpleQueue()

    def put(self, news: Progress | HomeostatError) -> None:
        self._news.put(news)

    def next_news(self, *, timeout_s: float) -> Progress | None:
        """Return what came next; None when `timeout_s` passed first. Raises the engine's error."""
        try:
            news = self._news.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(news, HomeostatError):
            raise news
        return news

    def all_news(self) -> Iterator[Progress]:
        """Yield everything until the request has ended."""
        while True:
            news = self.next_news(timeout_s=_IDLE_S)
            if news is not None:
                yield news
                if news.completion is not None:
                    return


class EngineThread:
    """Runs an engine. Close it, or use it as a context manager."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self._streams = Streams(engine)
        self._tickets: dict[str, Ticket] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._problem: HomeostatError | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> EngineThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def problem(self) -> HomeostatError | None:
        """Return why nothing can be served any more; None while all is well."""
        return self._problem

    def submit(self, request: Request) -> Ticket:
        """Queue a request. Raises EngineError if it cannot be served."""
        ticket = Ticket(request.id)

        def start() -> None:
            self._streams.submit(request)
            self._tickets[request.id] = ticket

        self.call(start)
        return ticket

    def cancel(self, id: str) -> None:
        """End a request that nobody waits for any more."""

        def end() -> None:
            self._streams.cancel(id)
            self._tickets.pop(id, None)

        self._inbox.put(end)

    def call(self, function: Callable[[], R]) -> R:
        """Run a function between two steps of the engine, and return its result."""
        future: Future[R] = Future()

        def answer() -> None:
            try:
                future.set_result(function())
            except HomeostatError as error:
                future.set_exception(error)

        self._inbox.put(answer)
        while True:
            if self._problem is not None and not future.done():
                raise self._problem
            try:
                return future.result(timeout=_IDLE_S)
            except TimeoutError:
                continue

    def close(self) -> None:
        """End the thread and the engine. Idempotent."""
        self._is_closing = True
        self._inbox.put(lambda: None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._take_calls(wait=len(self._streams) == 0)
                if len(self._streams):
                    for news in self._streams.advance(timeout_s=_SLICE_S):
                        self._give(news)
        except HomeostatError as error:
            self._problem = error
        except (RuntimeError, MemoryError) as error:
            # torch's own errors, above all out of memory: the engine's state is unknown now.
            self._problem = EngineError(f"the engine failed: {str(error) or type(error).__name__}")
        finally:
            self._problem = self._problem or EngineError("the server is shutting down.")
            for ticket in self._tickets.values():
                ticket.put(self._problem)
            self.engine.close()

    def _take_calls(self, *, wait: bool) -> None:
        try:
            if wait:
                self._inbox.get(timeout=_IDLE_S)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _give(self, news: Progress) -> None:
        if news.completion is not None:
            self._tickets.pop(news.id).put(news)
        else:
            self._tickets[news.id].put(news)
