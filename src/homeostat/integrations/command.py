"""Run a command and read what it prints, while it is passed on unchanged.

Standard output and standard error stay apart. The command's Python is asked not to buffer
(PYTHONUNBUFFERED), because a pipe would otherwise delay its lines by many steps.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, BinaryIO

from homeostat.errors import HomeostatError
from homeostat.health.readers.growing import GrowingLog
from homeostat.health.view import RunView
from homeostat.integrations.pace import Pace
from homeostat.integrations.watching import POLL_S, Watcher, timed_look

_CHUNK = 1 << 16
# Seconds that a pipe may stay open after the command's end, held by processes that it left behind.
_LINGER_S = 2.0
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


class Command:
    """A command whose output is read into a log and passed on."""

    def __init__(self, words: Sequence[str], *, names: Mapping[str, str] | None = None) -> None:
        self._log = GrowingLog("-", names=names)
        try:
            self._process = subprocess.Popen(
                list(words),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except OSError as error:
            raise HomeostatError(
                f"{words[0]!r} cannot be started: {error.strerror or error}. Give one PATH to "
                "follow a log or a run folder, or the command that starts a run after `--`."
            ) from None
        # Whether what was passed on last has no line end, such as a progress bar.
        self.is_line_open = False
        self._streams = selectors.DefaultSelector()
        self._targets: dict[int, BinaryIO] = {}
        for number, (pipe, target) in enumerate(
            ((self._process.stdout, sys.stdout.buffer), (self._process.stderr, sys.stderr.buffer))
        ):
            assert pipe is not None
            self._targets[number] = target
            self._streams.register(pipe, selectors.EVENT_READ, number)

    def pump(self, timeout_s: float) -> bool:
        """Wait for output and pass it on. Return whether there was any."""
        is_new = False
        for key, _ in self._streams.select(timeout_s):
            data = os.read(key.fd, _CHUNK)
            if not data:
                self._streams.unregister(key.fileobj)
                continue
            self._targets[key.data].write(data)
            self._targets[key.data].flush()
            self.is_line_open = not data.endswith(b"\n")
            self._log.feed(data, stream=key.data)
            is_new = True
        return is_new

    def poll(self) -> bool:
        return self.pump(0.0)

    def view(self) -> RunView:
        return self._log.view()

    def finish(self) -> None:
        self._log.finish()

    @property
    def has_output(self) -> bool:
        """Return whether some output may still come."""
        return bool(self._streams.get_map())

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end_line(self) -> None:
        """End an open line, so that the next text stands on a line of its own."""
        if self.is_line_open:
            sys.stderr.write("\n")
            self.is_line_open = False

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the command, if it still runs."""
        if not self.has_ended:
            self._process.terminate()

    def send(self, number: int) -> None:
        if not self.has_ended:
            self._process.send_signal(number)

    def exit_code(self) -> int:
        """Return the command's exit code; 128 + n if signal n ended it."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code


def run_command(command: Command, watcher: Watcher, *, interval_s: float) -> int:
    """Run a command to its end, and return its exit code."""
    pace = Pace(time.monotonic(), interval_s=interval_s)
    before = _pass_signals_on(command)
    is_new, ended_at = False, 0.0
    try:
        while command.has_output:
            is_new |= command.pump(POLL_S)
            if is_new and pace.is_due(time.monotonic()):
                is_new = not timed_look(command, watcher, pace)
            if command.has_ended:
                ended_at = ended_at or time.monotonic()
                if time.monotonic() - ended_at > _LINGER_S:
                    break
        code = command.exit_code()
        command.finish()
        timed_look(command, watcher, pace)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code


def _pass_signals_on(command: Command) -> dict[int, Any]:
    """Let the command decide what a signal means. Return the handlers that were there before."""

    def pass_on(number: int, _: FrameType | None) -> None:
        command.send(number)

    def interrupted(number: int, _: FrameType | None) -> None:
        # A terminal sends Ctrl-C to the command, too.
        if not os.isatty(0):
            command.send(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    return {**before, signal.SIGINT: signal.signal(signal.SIGINT, interrupted)}
