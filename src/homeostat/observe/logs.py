"""Set up the logging of a run: what a person sees, and console.log, which keeps all of it.

    homeostat.*          at the chosen level -> console and console.log
    other libraries      warnings and errors, Python warnings too -> console and console.log
    homeostat.progress   the view's lines, which the view itself shows -> console.log only

Importing this module sets up nothing; `logging_to` sets logging up and takes it down again.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from homeostat.errors import ConfigError, Problem
from homeostat.observe.redact import Scrubber
from homeostat.observe.safe_text import safe_text

LEVELS = ("debug", "info", "warning", "error")
PROGRESS_LOGGER = "homeostat.progress"


def resolve_level(flag: str | None, *, config: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the log level: `--log-level` wins, then HOMEOSTAT_DEBUG=1, then observe.log_level."""
    if flag is not None:
        if flag.lower() not in LEVELS:
            choices = ", ".join(LEVELS)
            raise ConfigError([Problem("--log-level", f"{flag!r} is not one of {choices}.")])
        return flag.lower()
    return "debug" if environ.get("HOMEOSTAT_DEBUG", "") not in ("", "0") else config


@contextmanager
def logging_to(
    console: Console,
    *,
    level: str,
    console_log: Path | None = None,
    scrubber: Scrubber | None = None,
) -> Iterator[None]:
    """Log to the console (the live view's own, so that lines go above it) and to a file.

    `scrubber` removes secrets from every line.
    """
    root, ours = logging.getLogger(), logging.getLogger("homeostat")
    progress = logging.getLogger(PROGRESS_LOGGER)
    before = (root.level, ours.level, progress.level, progress.propagate)
    scrubber = scrubber or Scrubber()
    handlers = [_console_handler(console, scrubber)]
    if console_log is not None:
        handlers.append(_file_handler(console_log, scrubber))
        progress.addHandler(handlers[-1])
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    ours.setLevel(level.upper())
    progress.setLevel(logging.INFO)
    progress.propagate = False
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for handler in handlers:
            root.removeHandler(handler)
            progress.removeHandler(handler)
            handler.close()
        root.setLevel(before[0])
        ours.setLevel(before[1])
        progress.setLevel(before[2])
        progress.propagate = before[3]


def tail(path: Path, num_lines: int, *, max_bytes: int = 65536) -> list[str]:
    """Return the last lines of a log file; none if it is missing."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return lines[-num_lines:]


def _console_handler(console: Console, scrubber: Scrubber) -> logging.Handler:
    if console.is_terminal:
        handler: logging.Handler = RichHandler(
            console=console, show_path=False, log_time_format="%H:%M:%S", markup=False
        )
        handler.setFormatter(_SafeFormatter("%(message)s", scrubber=scrubber))
        return handler
    handler = logging.StreamHandler(console.file)
    form = "%(asctime)s %(levelname)-7s %(message)s"
    handler.setFormatter(_SafeFormatter(form, "%H:%M:%S", scrubber=scrubber))
    return handler


def _file_handler(path: Path, scrubber: Scrubber) -> logging.Handler:
    handler = _ConsoleLog(path, encoding="utf-8", errors="backslashreplace")
    form = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    handler.setFormatter(_SafeFormatter(form, scrubber=scrubber))
    return handler


class _SafeFormatter(logging.Formatter):
    """Format a record and its traceback without secrets and without terminal control codes.

    console.log gets the same text, because people read it with cat.
    """

    def __init__(self, form: str, datefmt: str | None = None, *, scrubber: Scrubber) -> None:
        super().__init__(form, datefmt)
        self.scrubber = scrubber

    def format(self, record: logging.LogRecord) -> str:
        return safe_text(self.scrubber.text(super().format(record)))


class _ConsoleLog(logging.FileHandler):
    """A log file on a disk that may fill up: it reports this once and then stays quiet."""

    _told = False

    def close(self) -> None:
        with suppress(OSError):  # the last buffered lines cannot be written either
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            text = f"cannot write {self.baseFilename}: {sys.exc_info()[1]}"
            print(safe_text(text), file=sys.stderr)
