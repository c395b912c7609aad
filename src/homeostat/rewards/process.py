"""The parent's side of one worker process: start, ask, listen, kill.

A worker is `starting` until it reports what it loaded, then `idle`, or `busy` with one job. Every
state except `idle` has a deadline, and each answer sets a new one, because the next call has begun.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homeostat.json_text import parse_json
from homeostat.observe.exits import describe_signal
from homeostat.rewards.calls import Call
from homeostat.rewards.frames import FrameReader, send_frame
from homeostat.rewards.reaping import MARKER, end_marked, has_stopped_child

# Loading may import torch and download a judge; an idle worker accepts a request at once.
LOAD_SECONDS = 300.0
SEND_SECONDS = 30.0
DUMP_SECONDS = 0.5
REAP_SECONDS = 10.0
# The guardian ends everything that a worker started, and then itself.
GUARDIAN_SECONDS = 3.0

_BOOT = (
    "import sys; sys.path[:] = {path!r}; "
    "from homeostat.rewards.worker import main; main({channel}, {dump}, {log!r})"
)


log = logging.getLogger(__name__)


class WorkerGoneError(Exception):
    """The worker ended, or sent an invalid message. The text says how."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The arguments with which every worker of a pool is started."""

    rewards: list[dict[str, Any]]
    folder: Path
    log_file: Path | None
    load_s: float | None = None

    @property
    def load_limit_s(self) -> float:
        """Return how long a worker may take to load its rewards, in seconds."""
        return LOAD_SECONDS if self.load_s is None else self.load_s


class WorkerProcess:
    """One worker. It cannot be used after `end`."""

    def __init__(self, setup: Setup) -> None:
        # When the call that it is busy with began.
        self.asked_at = 0.0
        self.deadline = time.monotonic() + setup.load_limit_s
        self.is_loaded = False
        self._has_ended = False
        self._reader = FrameReader()
        self._dump = tempfile.TemporaryFile()  # noqa: SIM115
        # Identifies all descendants of the worker.
        self._marker = uuid.uuid4().hex
        self.channel, theirs = socket.socketpair()
        # A worker that does not read must not block the trainer forever.
        self.channel.settimeout(SEND_SECONDS)
        with theirs:
            self._process = _start(
                setup, self._marker, channel=theirs.fileno(), dump=self._dump.fileno()
            )
        # If the process is already dead, the first read will show it.
        with contextlib.suppress(ConnectionError):
            send_frame(self.channel, pickle.dumps(setup.rewards))

    def ask(self, labels: Sequence[str], calls: Sequence[Call], *, timeout_s: float) -> None:
        """Request the rewards of some groups, one answer for each reward, in this order."""
        try:
            send_frame(self.channel, pickle.dumps((list(labels), list(calls))))
        except OSError as error:
            raise WorkerGoneError(self.last_words()) from error
        self.asked_at = time.monotonic()
        self.deadline = self.asked_at + timeout_s

    def hear(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived. Call it when the channel is readable."""
        try:
            # One read per call: poll said that there is data, and a second read could block.
            data = self.channel.recv(2**20)
            self._reader.add(data)
            messages = []
            while (frame := self._reader.take()) is not None:
                messages.append(dict(parse_json(frame)))
        except ConnectionError as error:
            raise WorkerGoneError(self.last_words()) from error
        except (OSError, TypeError, ValueError) as error:
            raise WorkerGoneError(f"the worker's answer cannot be read: {error}") from error
        if not data:
            raise WorkerGoneError(self.last_words())
        return messages

    @property
    def pid(self) -> int:
        """Return the id of the process that was started, which is the worker's guardian."""
        return self._process.pid

    @property
    def was_killed(self) -> bool:
        """Return whether it was ended by SIGKILL, alone or with its guardian.

        A crash of a reward's own code ends it by another signal, or with an exit code.
        """
        code = self._process.returncode
        # Negative: the guardian itself was killed. 128 + 9: it reports that the worker was.
        return code is not None and (code < 0 or code == 128 + signal.SIGKILL)

    @property
    def is_stopped(self) -> bool:
        """Return whether the worker was stopped by a signal, so that its call cannot continue."""
        return self._process.returncode is None and has_stopped_child(self._process.pid)

    def last_words(self) -> str:
        """Describe how it ended."""
        self.end(patience_s=DUMP_SECONDS)
        code = self._process.returncode
        if code is None or code < 0:
            return "the worker process was killed from outside"
        if code <= 128:
            return f"the worker process ended with exit code {code}"
        return f"the worker process {describe_signal(code - 128)}"

    def where(self) -> str:
        """Return the stack where it is, or was when it crashed, innermost call first."""
        if self._process.returncode is None:
            self._ask_for_the_stack()
        text = os.pread(self._dump.fileno(), 2**16, 0).decode("utf-8", "replace")
        ours = str(Path(__file__).parent)
        not_users = (f'"{ours}', '"<string>"')
        lines = [line for line in text.splitlines() if not any(n in line for n in not_users)]
        return "\n".join(lines[:20])

    def _ask_for_the_stack(self) -> None:
        """Request the stack. It is written in pieces, and complete once it stops growing."""
        assert self._process.stdin is not None
        end, size = time.monotonic() + DUMP_SECONDS, 0
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"?")
        while time.monotonic() < end:
            time.sleep(0.02)
            before, size = size, os.fstat(self._dump.fileno()).st_size
            # faulthandler writes without an end mark, so a size that stays the same must do.
            if size and size == before:
                return

    def hang_up(self) -> None:
        """Close the channel: an idle worker then ends by itself and runs its exit handlers."""
        self.channel.close()

    def end(self, *, patience_s: float = 0.0) -> None:
        """Kill it and everything it started, unless it ends by itself in time. Idempotent."""
        self.hang_up()
        if self._has_ended:
            # Its process group id may belong to another group by now.
            return
        self._has_ended = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        assert self._process.stdin is not None
        # The guardian interprets the end of its input as the end of this process.
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GUARDIAN_SECONDS)
        # If the reward killed or stopped the guardian, we have to clean up.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("reward worker %d does not end after SIGKILL", self._process.pid)
        end_marked(self._marker)

    def close(self, *, patience_s: float = 0.0) -> None:
        """End it, and release its resources."""
        self.end(patience_s=patience_s)
        self._dump.close()


def _start(setup: Setup, marker: str, *, channel: int, dump: int) -> subprocess.Popen[bytes]:
    """Start the process without multiprocessing, which would import the parent's main and torch."""
    path = [str(setup.folder), *(entry for entry in sys.path if isinstance(entry, str))]
    log_file = None if setup.log_file is None else str(setup.log_file.resolve())
    boot = _BOOT.format(path=path, channel=channel, dump=dump, log=log_file)
    with open(setup.log_file or os.devnull, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", boot],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=(channel, dump),
            cwd=setup.folder,
            env={**os.environ, MARKER: marker},
            start_new_session=True,
        )
