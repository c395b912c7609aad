"""Stopping on request: the step in progress is finished and saved, then the run ends.

SIGTERM is what schedulers send, SIGINT is Ctrl-C, SIGHUP comes when the terminal goes away. Before
the first step there is nothing to finish, and a second signal does not wait either: the process
then ends at once, and what was saved stays whole.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

log = logging.getLogger(__name__)


class StopRequest:
    """Whether, and by which signal, the run was asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._steps_finish = False

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal is not None else 0

    def let_steps_finish(self) -> None:
        """From here on the first signal waits for the step in progress and its save."""
        self._steps_finish = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        at_once = self.requested or not self._steps_finish
        self.signal = self.signal or signal.Signals(number)
        if at_once:
            raise SystemExit(self.exit_code)
        # A handler may interrupt a log line half written: another thread waits until it is whole.
        threading.Thread(target=self._acknowledge, daemon=True).start()

    def _acknowledge(self) -> None:
        assert self.signal is not None
        text = "%s: the run ends after this step and its save. A second signal ends it at once"
        log.warning(text, self.signal.name)

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        # What is ignored stays so: `nohup` means it.
        heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._receive) for number in heard}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
