"""Launch the processes of a group on this host. All of them run child.py (CHILD).

    spawn      one process per rank, started by us
    torchrun   one torchrun, which starts one process per rank

Under both, torch.distributed finds its rendezvous, at the ticket's host, in the environment. A
launched process leads a separate session: ctrl-C in the terminal does not reach it. The signals
that a scheduler sends to every process of a job are blocked in it: torchrun would end its ranks
before the controller has saved.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from homeostat.workers.child import FOR_THE_CONTROLLER, Ticket

# -P: a file of the working directory must not shadow a module. -u: no line is lost at the end.
_PYTHON = (sys.executable, "-P", "-u", "-m")
CHILD = (*_PYTHON, "homeostat.workers.child")
END_SECONDS = 5.0

log = logging.getLogger(__name__)


class Process(Protocol):
    """A process that launches or guards workers, here or elsewhere; subprocess.Popen is one."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...


Launch = Callable[..., list[subprocess.Popen[bytes]]]


def spawn(ticket: Ticket, *, env: Mapping[str, str], folder: Path) -> list[subprocess.Popen[bytes]]:
    started = []
    shared = _rendezvous(ticket) if ticket.size > 1 else {}
    for rank in range(ticket.size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} if shared else {}
        mine = replace(ticket, rank=rank)
        started.append(_start(CHILD, mine, env={**place, **env}))
    return started


def torchrun(
    ticket: Ticket, *, env: Mapping[str, str], folder: Path
) -> list[subprocess.Popen[bytes]]:
    """Start the ranks with torchrun. --standalone finds a free port; its log folder stays empty."""
    command = (
        *(*_PYTHON, "torch.distributed.run", "--standalone", "--local-addr", ticket.host),
        *("--nproc-per-node", str(ticket.size), "--max-restarts", "0"),
        *("--log-dir", str(folder / "torchrun"), "--no-python", *CHILD),
    )
    return [_start(command, ticket, env=env)]


def end_launchers(launchers: Sequence[Process], *, patience_s: float) -> None:
    """Wait until they end by themselves; then SIGKILL: other signals are blocked in them.

    Workers that they leave behind end with their channel.
    """
    for process in _still_there(launchers, patience_s):
        process.send_signal(signal.SIGKILL)
    for process in _still_there(launchers, END_SECONDS):
        log.warning("%s does not end after SIGKILL", process)


def _still_there(launchers: Sequence[Process], timeout_s: float) -> list[Process]:
    end = time.monotonic() + timeout_s
    for process in launchers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
    return [process for process in launchers if process.poll() is None]


def _rendezvous(ticket: Ticket) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind((ticket.host, 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(ticket.size), "LOCAL_WORLD_SIZE": str(ticket.size)}
    return {**world, "MASTER_ADDR": ticket.host, "MASTER_PORT": str(port)}


def _start(
    command: Sequence[str], ticket: Ticket, *, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    # The factory is found wherever the controller would find it, and homeostat too.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, **env, **ticket.environment()}
    with open(ticket.log_file, "ab") as output, blocked(FOR_THE_CONTROLLER):
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextlib.contextmanager
def blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread; a process that is started meanwhile inherits that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
