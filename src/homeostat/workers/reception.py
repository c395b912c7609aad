"""Let the processes of a group check in: two channels for each rank, its worker's and guardian's.

The launchers are watched while the processes start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from homeostat.errors import WorkerDiedError, WorkerError
from homeostat.observe.exits import describe_exit
from homeostat.workers.channel import Channel, Listener, SocketListener
from homeostat.workers.child import GUARDIAN, WORKER, exit_code_of_worker
from homeostat.workers.launchers import Process
from homeostat.workers.link import RankLink
from homeostat.workers.log import WorkerLog
from homeostat.workers.wire import Greeting

GREETING_SECONDS = 5.0
LOOK_ROUND_SECONDS = 0.1

Kill = Callable[[int, tuple[int, int]], None]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A process that has checked in."""

    channel: Channel
    pid: int


class Reception:
    """Open while a group starts. Channels that it took and did not hand out are closed with it.

    `kill` kills the process groups of a rank's worker and guardian, wherever they are, by their
    pids.
    """

    def __init__(self, listener: Listener, *, size: int, log: WorkerLog, kill: Kill) -> None:
        self.listener = listener
        self._size = size
        self._log = log
        self._kill = kill
        self._arrived: dict[tuple[str, int], Arrival] = {}

    def links(self, launchers: Sequence[Process], *, timeout_s: float) -> list[RankLink]:
        """Wait until every rank has checked in, worker and guardian."""
        end = time.monotonic() + timeout_s
        while absent := self._absent():
            self._look_after(launchers, absent[0])
            if time.monotonic() > end:
                raise WorkerError(
                    f"{self._log.group_name}: rank {', '.join(map(str, absent))} did not start "
                    f"within {timeout_s:.4g} s." + self._log.last_words(absent[0])
                )
            self._admit()
        arrived, self._arrived = self._arrived, {}
        return [
            self._link(rank, worker=arrived[WORKER, rank], guardian=arrived[GUARDIAN, rank])
            for rank in range(self._size)
        ]

    def close(self) -> None:
        self.listener.close()
        for arrival in self._arrived.values():
            arrival.channel.close()

    def _link(self, rank: int, *, worker: Arrival, guardian: Arrival) -> RankLink:
        return RankLink(
            rank,
            worker=worker.channel,
            guardian=guardian.channel,
            kill=partial(self._kill, rank, (worker.pid, guardian.pid)),
            log=self._log,
        )

    def _absent(self) -> list[int]:
        both = (WORKER, GUARDIAN)
        return [r for r in range(self._size) if any((p, r) not in self._arrived for p in both)]

    def _look_after(self, launchers: Sequence[Process], absent: int) -> None:
        for rank, process in enumerate(launchers):
            code = process.poll()
            if code is not None:
                is_own = len(launchers) == self._size
                who = f"the process of rank {rank}" if is_own else "the launcher"
                how = describe_exit(exit_code_of_worker(code) if is_own else code)
                raise WorkerDiedError(
                    f"{self._log.group_name}: {who} {how} before rank {absent} had started."
                    + self._log.last_words(rank if is_own else absent)
                )

    def _admit(self) -> None:
        """Take in the next process, if one comes soon."""
        channel = self.listener.accept(timeout_s=LOOK_ROUND_SECONDS)
        if channel is None:
            return
        try:
            greeting = Greeting.unpacked(channel.receive(timeout_s=GREETING_SECONDS))
        except OSError:
            # It died while it checked in, which is noticed elsewhere.
            channel.close()
            return
        self._arrived[greeting.part, greeting.rank] = Arrival(channel, greeting.pid)


def listener_in(folder: Path, name: str, *, size: int) -> SocketListener:
    """Return where the processes of a group of this host check in. Raises WorkerError."""
    try:
        return SocketListener(folder, backlog=2 * size)
    except OSError as error:
        raise WorkerError(
            f"{name}: no socket can be made in {folder}: {error}. "
            "Set TMPDIR to a short path on a local disk."
        ) from error


def kill_groups(leaders: Iterable[int]) -> None:
    """Kill the process groups that these processes of this host lead."""
    for pid in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
