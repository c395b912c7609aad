"""Processes that are forked from one that has imported torch and homeostat already.

    Forked(code, arguments) -> request with two pipes -> server: fork -> child: runs the code
                                                         server: reaps it, writes down how it ended

A forked process is like one of `python -c code arguments`: it has its own memory, limits, signals
and end, and may be killed. Only its imports are shared, which take ten times as long as a tiny run.
`forked_workers` lets workers be started in this manner, too. Starts themselves are tested where
they are real: tests/contract/test_worker_group_contract.py, tests/integration/test_fsdp_run.py.

The server is tests/support/fork_server.py.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.fork_server import MAX_REQUEST_BYTES

from homeostat.data import helpers
from homeostat.rewards import process as reward_process
from homeostat.workers import launchers
from homeostat.workers.child import Ticket

ROOT = Path(__file__).resolve().parents[2]
TRAINS = (
    "homeostat.cli.verbs",
    "homeostat.run.calling.start",
    "homeostat.train.local",
    "transformers",
)
# torch.distributed.fsdp imports torch's compiler.
SHARDS = (*TRAINS, "homeostat.train.fsdp.make")
# A worker that scores completions starts without torch, unless a model scores them, and without
# the packages of tasks, unless a reward needs them: both take seconds to import.
REWARDS = ("homeostat.rewards.worker",)
TASK_REWARDS = (*REWARDS, "math_verify", "reasoning_gym")

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
        streams: Sequence[int] = (),
        cwd: str | None = None,
        **more: Any,
    ) -> None:
        """`streams` are its standard input, and descriptors that the code finds in STREAMS."""
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._output, theirs = os.pipe()
        self._end, end = os.pipe()
        argv, cwd = ["-c", *arguments], cwd or os.getcwd()
        request = {"code": code, "argv": argv, "env": dict(env), "cwd": cwd}
        passed = [theirs if output is None else output, end, *streams]
        self.pid = _server(imported).fork(request | more, passed)
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
    if tuple(command) != launchers.CHILD:
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


class _ForkedReward(Forked):
    """A worker that scores completions, as rewards/process.py knows it."""

    def __init__(self, setup: reward_process.Setup, marker: str, *, channel: int, dump: int):
        path = [str(setup.folder), *(entry for entry in sys.path if isinstance(entry, str))]
        log_file = None if setup.log_file is None else str(setup.log_file.resolve())
        code = f"from homeostat.rewards.worker import main\nmain(*STREAMS, {log_file!r})"
        theirs, ours = os.pipe()
        self.stdin = os.fdopen(ours, "wb", buffering=0)
        with open(setup.log_file or os.devnull, "ab") as output:
            super().__init__(
                code,
                env={**os.environ, reward_process.MARKER: marker},
                output=output.fileno(),
                imported=_imported_by({reward["type"] for reward in setup.rewards}),
                streams=[theirs, channel, dump],
                cwd=str(setup.folder),
                path=path,
            )
        os.close(theirs)


def _imported_by(types: set[str]) -> tuple[str, ...]:
    """Return the modules that rewards of these types import."""
    if "reward_model" in types:
        return TRAINS
    return TASK_REWARDS if types & {"math_verify", "reasoning_gym"} else REWARDS


_really_start_reward = reward_process._start


@contextmanager
def forked_rewards() -> Iterator[None]:
    """Workers that score completions are forked."""
    with patch.object(reward_process, "_start", _ForkedReward):
        yield


@contextmanager
def real_rewards() -> Iterator[None]:
    """Workers that score completions are started as they are outside of tests."""
    with patch.object(reward_process, "_start", _really_start_reward):
        yield


@contextmanager
def forked_helpers() -> Iterator[None]:
    """Processes that prepare rows are forked from one that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["homeostat.data.prepare"])
    with patch.object(helpers, "_CONTEXT", context):
        yield


@contextmanager
def real_helpers() -> Iterator[None]:
    """Processes that prepare rows are started as they are outside of tests."""
    with patch.object(helpers, "_CONTEXT", multiprocessing.get_context("spawn")):
        yield


class _Server:
    """The process that is forked, as its client sees it. It ends with this process."""

    def __init__(self, imported: tuple[str, ...]) -> None:
        self._socket = _connected(imported)
        self._socket.settimeout(START_SECONDS)
        self._lock = threading.Lock()
        SERVERS.append(int(self._socket.recv(32)))

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        packed = json.dumps(request).encode()
        assert len(packed) < MAX_REQUEST_BYTES, len(packed)
        with self._lock:
            socket.send_fds(self._socket, [packed], streams)
            return int(self._socket.recv(32))


def _connected(imported: tuple[str, ...]) -> socket.socket:
    """Connect to the root of these modules, which the first test process of a session starts."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"process {os.getpid()}")
    # Of Linux' abstract names: they end with the socket, and leave no file.
    name = "\0" + sha256(json.dumps([session, str(ROOT), *imported]).encode()).hexdigest()
    until = time.monotonic() + START_SECONDS
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            if _is_bound(listener, name):
                listener.listen()
                _start_root(listener, imported)
        found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            found.connect(name)
        except ConnectionRefusedError:
            # Another process has the name, and does not listen yet or any more.
            found.close()
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
        else:
            return found


def _is_bound(listener: socket.socket, name: str) -> bool:
    """Take the name, unless another process has it."""
    try:
        listener.bind(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def _start_root(listener: socket.socket, imported: tuple[str, ...]) -> None:
    path = os.pathsep.join(os.path.abspath(entry) for entry in (ROOT, *sys.path))
    subprocess.run(
        [sys.executable, "-m", "tests.support.fork_server", str(listener.fileno()), *imported],
        pass_fds=[listener.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )


# The processes that children of this one are forked from.
SERVERS: list[int] = []


@cache
def _server(imported: tuple[str, ...]) -> _Server:
    return _Server(imported)
