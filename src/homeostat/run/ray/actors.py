"""The Ray actor of one worker: it holds the resources, and starts the worker's process beside it.

    controller -> Keeper (actor) -> child.py: guardian -> worker
         ^------------- TCP channels of both -------------'

The actor is only a launcher on another machine: calls, answers, log lines and the exit code travel
over the channels that processes of every launcher have (workers/channel.py), so that errors,
deadlines and logs are the same. The guardian ends when the controller does; the controller ends the
guardian when the actor dies.

This file is imported on every node: standard library, and the part of homeostat that has no torch.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from homeostat.workers.child import Ticket
from homeostat.workers.launchers import CHILD
from homeostat.workers.reception import kill_groups

OUTPUT_BYTES = 2**16
# What ended may leave its output open for a moment.
DRAIN_SECONDS = 1.0
HOST_VARIABLE = "HOMEOSTAT_HOST"
# Linux: the address of a network interface.
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Place:
    """The node of an actor, the address at which others reach it, and its GPUs."""

    node_id: str
    address: str
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """The surroundings of the controller: the `folder` to which paths are relative, where it finds
    modules (`path`, as far as it exists elsewhere), and its priority."""

    folder: str
    path: tuple[str, ...]
    niceness: int

    @classmethod
    def of_this_process(cls) -> Site:
        path = tuple(os.path.abspath(entry) for entry in sys.path)
        return cls(os.getcwd(), path, os.getpriority(os.PRIO_PROCESS, 0))


class Keeper:
    """The actor. Calls run in several threads: `watch` waits while others are answered."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: collections.deque[bytes] = collections.deque(maxlen=200)
        self._reader: threading.Thread | None = None

    def free_port(self, address: str) -> int:
        """Return a port of this node at which ranks may meet."""
        return free_port(address)

    def launch(self, ticket: Ticket, env: Mapping[str, str], site: Site) -> int:
        """Start the worker's process as the controller would start it."""
        shared = [entry for entry in site.path if os.path.exists(entry)]
        found = os.pathsep.join(dict.fromkeys([*shared, *filter(None, sys.path)]))
        own = {**network_variables(ticket.host), HOST_VARIABLE: ticket.host, "PYTHONPATH": found}
        self._process = subprocess.Popen(
            CHILD,
            cwd=site.folder,
            env={**os.environ, **own, **env, **ticket.environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # Ray runs its workers at low priority (RAY_worker_niceness); only root may undo that.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, site.niceness)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self._process.pid

    def watch(self) -> tuple[int, bytes]:
        """Wait for the end of the process. Returns its exit code, and what its guardian wrote."""
        assert self._process is not None
        assert self._reader is not None
        code = self._process.wait()
        self._reader.join(DRAIN_SECONDS)
        return code, b"".join(self._output)

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill_groups(self, pids: Sequence[int]) -> None:
        kill_groups(pids)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._output.append(line[:OUTPUT_BYTES])


def free_port(address: str) -> int:
    """Return a port of an address of this machine that nothing uses. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def network_variables(address: str) -> dict[str, str]:
    """Return the variables that bind collectives to the interface of an address of this machine.

    Without them gloo takes what the host's name resolves to, which may be the loopback address.
    """
    name = interface_of(address)
    if name is None:
        return {}
    variables = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {key: value for key, value in variables.items() if key not in os.environ}


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None where it is not found."""
    if address.startswith("127."):
        return "lo" if sys.platform == "linux" else None
    try:
        import fcntl

        packed = socket.inet_aton(address)
    except (ImportError, OSError):
        return None
    with socket.socket() as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                if fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24] == packed:
                    return name
    return None
