"""Replacements of engines that died: started in the background, while the others keep sampling."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from homeostat.errors import EngineError, NodeLostError
from homeostat.rollout.remote import RemoteEngine

log = logging.getLogger(__name__)

# How long the end of a run waits for a process that is still starting.
CLOSE_SECONDS = 10.0

StartEngine = Callable[[str], RemoteEngine]
Outcome = RemoteEngine | EngineError | NodeLostError


class Replacements:
    """Starts engine processes in threads. `start` starts the one of a given name."""

    def __init__(self, start: StartEngine, *, timeout_s: float) -> None:
        self.start = start
        self.timeout_s = timeout_s
        self._outcomes: SimpleQueue[tuple[str, Outcome]] = SimpleQueue()
        self._threads: dict[str, threading.Thread] = {}
        self._is_closed = False

    @property
    def num_starting(self) -> int:
        """Number of engines that were begun, and that nobody has taken yet."""
        return len(self._threads)

    def begin(self, name: str) -> None:
        """Start another engine of this name."""
        thread = threading.Thread(target=self._run, args=(name,), name=f"start-{name}", daemon=True)
        self._threads[name] = thread
        thread.start()

    def take(self, *, wait: bool) -> tuple[str, Outcome] | None:
        """Return the name of an engine whose start is over, and the engine, or the error that ended
        it. None if there is no such engine; with `wait`, EngineError if there is none in time."""
        try:
            found = self._outcomes.get(block=wait, timeout=self.timeout_s)
        except Empty:
            if not wait:
                return None
            raise EngineError(
                f"waited {self.timeout_s:g} s for {', '.join(self._threads)} to start in place of "
                "engines that died. If they need more time, raise engine.start_timeout_s."
            ) from None
        del self._threads[found[0]]
        return found

    def close(self) -> None:
        """End what was started and not taken."""
        self._is_closed = True
        for thread in self._threads.values():
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                log.warning("%s is still under way; it ends with this process", thread.name)
        while not self._outcomes.empty():
            _, outcome = self._outcomes.get()
            if isinstance(outcome, RemoteEngine):
                outcome.close()

    def _run(self, name: str) -> None:
        try:
            outcome: Outcome = self.start(name)
        except (EngineError, NodeLostError) as error:
            outcome = error
        if self._is_closed and isinstance(outcome, RemoteEngine):
            outcome.close()
            return
        self._outcomes.put((name, outcome))
