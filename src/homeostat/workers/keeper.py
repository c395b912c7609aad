"""Start the process of one worker on another machine, and watch it, for a controller elsewhere.

    controller -> Keeper -> child.py: guardian -> worker
         ^------------- TCP channels of both -------------'

A Keeper is only a launcher: calls, answers, log lines and the exit code travel over the channels
that processes of every launcher have (channel.py), so that errors, deadlines and logs are the same.
The guardian ends when the controller does; the controller ends the guardian when the Keeper's
process dies. Under Ray the Keeper is an actor; under an outer torchrun or srun it is held by the
process that was started for the rank (seat.py).

This file is imported on every node: standard library, and the part of homeostat that has no torch.
"""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from homeostat.workers.child import FOR_THE_CONTROLLER, Ticket
from homeostat.workers.launchers import CHILD, blocked
from homeostat.workers.machine import Versions, text_of
from homeostat.workers.network import free_port, network_variables
from homeostat.workers.reception import kill_groups

OUTPUT_BYTES = 2**16
# The output of an ended process may stay open for a moment.
DRAIN_SECONDS = 1.0
HOST_VARIABLE = "HOMEOSTAT_HOST"


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
    """Starts and watches one process.

    Calls run in several threads, so `watch` may wait meanwhile.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: collections.deque[bytes] = collections.deque(maxlen=200)
        self._reader: threading.Thread | None = None

    def look(self, file: str) -> tuple[Versions, str | None]:
        """Return the versions of this machine, and the text of a file if it is visible here."""
        return Versions.here(), text_of(file)

    def free_port(self, address: str) -> int:
        """Return a port of this node at which ranks may meet."""
        return free_port(address)

    def launch(self, ticket: Ticket, env: Mapping[str, str], site: Site) -> int:
        """Start the worker's process as the controller would start it."""
        shared = [entry for entry in site.path if os.path.exists(entry)]
        found = os.pathsep.join(dict.fromkeys([*shared, *filter(None, sys.path)]))
        own = {**network_variables(ticket.host), HOST_VARIABLE: ticket.host, "PYTHONPATH": found}
        with blocked(FOR_THE_CONTROLLER):
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
