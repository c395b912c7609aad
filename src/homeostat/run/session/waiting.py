"""Show the progress of work that comes before the first step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# How often progress is logged if there is no terminal to draw a bar on.
SECONDS_BETWEEN_LINES = 10.0

log = logging.getLogger(__name__)


@contextmanager
def progress_of(what: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with (done, total): it draws a bar on a terminal, or logs lines."""
    if not console.is_terminal:
        yield _Lines(what)
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Logs progress, at most once every `SECONDS_BETWEEN_LINES`."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.started = self.last_line = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.last_line >= SECONDS_BETWEEN_LINES and done:
            self.last_line = now
            left = (now - self.started) / done * (total - done)
            log.info("%s: %d of %d, about %.0f s left", self.what, done, total, left)
