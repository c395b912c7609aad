"""Processes that are forked from one that has imported torch and homeostat already.

    Forked(code, arguments) -> request with two pipes -> server: fork -> child: runs the code
                                                         server: reaps it, writes down how it ended

A forked process is like one of `python -c code arguments`: it has its own memory, limits, signals
and end, and may be killed. Only its imports are shared, which take ten times as long as a tiny run.
A start itself is not tested by these.

The server runs no threads and computes nothing, so that a fork of it is sound.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = ("homeostat.cli.verbs", "homeostat.api", "homeostat.train.local", "transformers")
MAX_REQUEST_BYTES = 2**17
START_SECONDS = 120


class Forked:
    """Has the methods of `subprocess.Popen` that tests use. Output and errors are one text."""

    def __init__(self, code: str, arguments: list[str], *, env: dict[str, str]) -> None:
        self.returncode: int | None = None
        self._output, theirs = os.pipe()
        self._end, end = os.pipe()
        request = {"code": code, "argv": ["-c", *arguments], "env": env, "cwd": os.getcwd()}
        self.pid = _server().fork(request, [theirs, end])
        os.close(theirs)
        os.close(end)

    def poll(self) -> int | None:
        return self._wait_until(0.0)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return all output, when the process has ended."""
        until = None if timeout is None else time.monotonic() + timeout
        parts: list[bytes] = []
        while not parts or parts[-1]:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._output], [], [], left)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            parts.append(os.read(self._output, 2**16))
        os.close(self._output)
        left = None if until is None else max(1.0, until - time.monotonic())
        if self._wait_until(left) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return b"".join(parts).decode(), None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait_until(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], timeout_s)[0]:
            self.returncode = int(os.read(self._end, 32))
            os.close(self._end)
        return self.returncode


class _Server:
    """The process that is forked, as its client sees it. It ends with this process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_SECONDS)
        with theirs:
            path = os.pathsep.join(os.path.abspath(entry) for entry in (ROOT, *sys.path))
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.forks", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )

    def fork(self, request: dict[str, Any], pipes: list[int]) -> int:
        packed = json.dumps(request).encode()
        assert len(packed) < MAX_REQUEST_BYTES, len(packed)
        socket.send_fds(self._socket, [packed], pipes)
        return int(self._socket.recv(32))


@cache
def _server() -> _Server:
    return _Server()


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each request. Returns in the children alone, with their request."""
    # SIGCHLD wakes the select below.
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    ends: dict[int, int] = {}
    while True:
        ready = select.select([connection, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 2**10)
            _reap(ends)
        if connection in ready:
            packed, pipes, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 2)
            if not packed:
                sys.exit(0)
            output, end = pipes
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (woken, wakes, end, *ends.values()):
                    os.close(number)
                connection.close()
                for stream in (1, 2):
                    os.dup2(output, stream)
                os.close(output)
                return json.loads(packed)
            os.close(output)
            ends[child] = end
            connection.send(str(child).encode())


def _reap(ends: dict[int, int]) -> None:
    """Write down how children ended, as `subprocess` would say it."""
    for child in list(ends):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            end = ends.pop(child)
            os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(end)


def _become(request: dict[str, Any]) -> types.ModuleType:
    """Make this process that of the request. Returns its main module."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[:] = request["argv"]
    # Names of temporary files and the like are not to be those of the last child.
    random.seed()
    # Processes that this one spawns import its main module again: it is not to be this file.
    sys.modules["__main__"] = types.ModuleType("__main__")
    return sys.modules["__main__"]


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()
    request = _serve(connection)
    exec(compile(request["code"], "<string>", "exec"), vars(_become(request)))


if __name__ == "__main__":
    main()
