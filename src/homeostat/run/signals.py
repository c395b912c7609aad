"""Stopping on request: the step in progress is finished and saved, then the run ends.

SIGTERM is what schedulers send, SIGINT is Ctrl-C. A second one ends the process at once; what was
saved stays whole.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether, and by which signal, the run was asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal is not None else 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        before = {
            number: signal.signal(number, self._receive)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
