"""Show how much of a download has arrived: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from homeostat.observe import format as fmt

SECONDS_BETWEEN_LINES = 10.0

Show = Callable[[int, int], None]


@contextmanager
def download_of(name: str, console: Console) -> Iterator[Show]:
    """Yield a function to call with (bytes that are there, bytes in all)."""
    if not console.is_terminal:
        yield _Lines(name, console)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Print a line at the beginning, and at most every `SECONDS_BETWEEN_LINES`."""

    def __init__(self, name: str, console: Console) -> None:
        self.name, self.console = name, console
        self.last_line: float | None = None

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self.last_line is not None and now - self.last_line < SECONDS_BETWEEN_LINES:
            return
        self.last_line = now
        text = f"downloading {self.name}: {fmt.byte_size(done)} of {fmt.byte_size(total)}"
        self.console.print(Text(text), soft_wrap=True)
