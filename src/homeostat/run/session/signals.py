"""Stop a run on request: finish and save the step in progress, then end.

Schedulers send SIGTERM, or SIGUSR1 where they were asked to warn before the time is over (Slurm's
`--signal=USR1@300`); Ctrl-C sends SIGINT, and a closed terminal sends SIGHUP. The process ends at
once if no step has started yet, or on a second signal; files that were saved stay intact.

Code that drives a run by itself (homeostat.steps) asks for the same by `ask`.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

log = logging.getLogger(__name__)


# The value of `StopRequest.by` if the Python code that called the run asked it to stop.
CALLER = "the caller"


class StopRequest:
    """Records who asked the run to stop: a signal, or the code that called the run."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        # Whether a signal ends the process without finishing the step in progress.
        self.at_once = False
        self._is_asked = False
        self._steps_finish = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self.signal is not None or self._is_asked

    @property
    def by(self) -> str:
        """Return the name of the signal, or CALLER."""
        return self.signal.name if self.signal is not None else CALLER

    def ask(self) -> None:
        """Ask the run to end after the step in progress and its save."""
        self._is_asked = True

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal is not None else 0

    def let_steps_finish(self) -> None:
        """Make the first signal wait, from now on, until the step in progress is done and saved."""
        self._steps_finish = True

    def end_at_once(self) -> None:
        """Make the first signal end the process, from now on: no step is in progress."""
        self._steps_finish = False
        if self.signal is not None:
            raise SystemExit(self.exit_code)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        at_once = self.requested or not self._steps_finish
        self.signal = self.signal or signal.Signals(number)
        if at_once:
            self.at_once = True
            raise SystemExit(self.exit_code)
        # This handler may have interrupted a log call. The log's lock would let the same thread
        # write into the middle of that line; another thread waits until the line is complete.
        threading.Thread(target=self._acknowledge, daemon=True).start()

    def _acknowledge(self) -> None:
        assert self.signal is not None
        text = "%s: the run ends after this step and its save. A second signal ends it at once"
        log.warning(text, self.signal.name)

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle the signals for the duration of the block.

        Python lets only the main thread handle signals: in another one nothing is changed.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        self._listen()
        try:
            yield self
        finally:
            self._give_back()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Give the signals back to the caller of the run, whose code runs in the block."""
        if not self._before or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._give_back()
        try:
            yield
        finally:
            self._listen()

    def _listen(self) -> None:
        # A signal that is ignored stays ignored: that is what `nohup` asks for.
        heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._receive) for number in heard}

    def _give_back(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)
