"""Processes that are forked from one that has imported torch and homeostat already.

    Forked(code, arguments) -> request with two pipes -> server: fork -> child: runs the code
                                                         server: reaps it, writes down how it ended

A forked process is like one of `python -c code arguments`: it has its own memory, limits, signals
and end, and may be killed. Only its imports are shared, which take ten times as long as a tiny run.
`forked_workers` lets workers be started in this manner, too. Starts themselves are tested where
they are real: tests/contract/test_worker_group_contract.py, tests/integration/test_fsdp_run.py.

The server runs no threads and computes nothing, so that a fork of it is sound.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from homeostat.workers import launchers
from homeostat.workers.child import Ticket

ROOT = Path(__file__).resolve().parents[2]
TRAINS = ("homeostat.cli.verbs", "homeostat.api", "homeostat.train.local", "transformers")
# torch.distributed.fsdp imports torch's compiler.
SHARDS = (*TRAINS, "homeostat.train.fsdp.make")
MAX_REQUEST_BYTES = 2**17
START_SECONDS = 120


class Forked:
    """Has the methods of `subprocess.Popen` that are used here. Output and errors are one stream:
    of a file's descriptor, or else of `communicate`."""

    def __init__(
        self,
        code: str,
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str],
        output: int | None = None,
        imported: tuple[str, ...] = TRAINS,
        **more: Any,
    ) -> None:
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._output, theirs = os.pipe()
        self._end, end = os.pipe()
        request = {"code": code, "argv": ["-c", *arguments], "env": dict(env), "cwd": os.getcwd()}
        streams = [theirs if output is None else output, end]
        self.pid = _server(imported).fork(request | more, streams)
        os.close(theirs)
        os.close(end)

    def poll(self) -> int | None:
        return self._end_within(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._end_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def communicate(self, timeout: float = START_SECONDS) -> tuple[str, None]:
        """Return all output, when the process has ended."""
        until = time.monotonic() + timeout
        parts: list[bytes] = []
        while not parts or parts[-1]:
            left = max(0.0, until - time.monotonic())
            if not select.select([self._output], [], [], left)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            parts.append(os.read(self._output, 2**16))
        self.wait(max(1.0, until - time.monotonic()))
        return b"".join(parts).decode(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end_within(self, timeout_s: float | None) -> int | None:
        """Return the exit code, as `subprocess` gives it. Several threads may wait."""
        is_over = self.returncode is not None or select.select([self._end], [], [], timeout_s)[0]
        with self._lock:
            if is_over and self.returncode is None:
                self.returncode = int(os.read(self._end, 32))
        return self.returncode

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound above: at Python's end `os` may be gone.
        for pipe in (self._output, self._end):
            close(pipe)


# Workers that were forked, in order.
WORKERS: list[Forked] = []


_really_start = launchers._start


@contextmanager
def forked_workers() -> Iterator[None]:
    """Workers that are spawned are forked. Those of torchrun are started by it."""
    with patch.object(launchers, "_start", _fork_worker):
        yield


@contextmanager
def real_workers() -> Iterator[None]:
    """Workers are started as they are outside of tests."""
    with patch.object(launchers, "_start", _really_start):
        yield


def _fork_worker(command: Sequence[str], ticket: Ticket, *, env: Mapping[str, str]) -> Any:
    if tuple(command) != launchers._CHILD:
        return _really_start(command, ticket, env=env)
    with open(ticket.log_file, "ab") as output:
        worker = Forked(
            "from homeostat.workers.child import main\nmain()",
            env={**os.environ, **env, **ticket.environment()},
            output=output.fileno(),
            imported=SHARDS if ticket.group_name == "trainer" else TRAINS,
            path=[os.path.abspath(entry) for entry in sys.path],
        )
    WORKERS.append(worker)
    return worker


class _Server:
    """The process that is forked, as its client sees it. It ends with this process."""

    def __init__(self, imported: tuple[str, ...]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_SECONDS)
        self._lock = threading.Lock()
        with theirs:
            path = os.pathsep.join(os.path.abspath(entry) for entry in (ROOT, *sys.path))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forks", str(theirs.fileno()), *imported],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        SERVERS.append(self._process.pid)

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        packed = json.dumps(request).encode()
        assert len(packed) < MAX_REQUEST_BYTES, len(packed)
        with self._lock:
            socket.send_fds(self._socket, [packed], streams)
            return int(self._socket.recv(32))


# The processes that are forked.
SERVERS: list[int] = []


@cache
def _server(imported: tuple[str, ...]) -> _Server:
    return _Server(imported)


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
    if "path" in request:
        # A worker: it leads a session, and no line of it is lost at its end.
        sys.path[:] = request["path"]
        os.setsid()
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    # Names of temporary files and the like are not to be those of the last child.
    random.seed()
    # Processes that this one spawns import its main module again: it is not to be this file.
    sys.modules["__main__"] = types.ModuleType("__main__")
    return sys.modules["__main__"]


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()
    request = _serve(connection)
    status = _run(request["code"], _become(request))
    # What Python does at its end, except for taking apart all modules: that takes half a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _run(code: str, module: types.ModuleType) -> int:
    """Return the exit status that Python would end with."""
    try:
        exec(compile(code, "<string>", "exec"), vars(module))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    main()
