"""A group of worker processes, started by any launcher and called over channels.

    open_processes -> launcher -> child.py x size -> reception -> "(start)" -> ProcessGroup

`open_processes` is for processes of this host. Processes of other hosts are `Started` by another
launcher, and called in the same manner (`open_started`).

A rank that dies fails all pending calls of the group, with a report, and ends the other ranks: they
may be waiting for it in a collective. An ended group cannot be used again: open a new group.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from homeostat.config.cluster import AnyCluster
from homeostat.errors import (
    WorkerDiedError,
    WorkerError,
    WorkerHungError,
    WorkerOutOfMemoryError,
)
from homeostat.observe.exits import describe_exit, is_death_of_memory, num_kernel_kills
from homeostat.workers.child import DRAIN_SECONDS, Ticket
from homeostat.workers.group import Pending, describe_overdue, gather
from homeostat.workers.hang import report_hang
from homeostat.workers.hosting import CLOSE, START
from homeostat.workers.launchers import END_SECONDS, Launch, Process, end_launchers
from homeostat.workers.link import RankLink
from homeostat.workers.log import WorkerLog
from homeostat.workers.reception import Reception, kill_groups, listener_in
from homeostat.workers.spec import GroupSpec
from homeostat.workers.wire import pack

KILL_SECONDS = 5.0
# Time limit for a guardian's report on its worker.
REPORT_SECONDS = 8.0
# Delay before an exception is reported, in case another rank's death caused it: its guardian may
# wait for the last lines of processes that the rank started, before it reports the death.
HOLD_BACK_SECONDS = DRAIN_SECONDS + 2.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """Workers that have checked in. `launchers` are watched; `release` gives back what they used.

    `describe_end` returns how the launcher at an index ended, given its exit code. `machines` are
    those of the ranks, where a launcher chose them.
    """

    links: Sequence[RankLink]
    launchers: Sequence[Process]
    release: Callable[[], None]
    describe_end: Callable[[int, int], str]
    machines: Sequence[str] = ()


def open_processes(cluster: AnyCluster, spec: GroupSpec, *, launch: Launch) -> ProcessGroup:
    """Start the workers of a group as processes of this host."""
    return open_started(spec, partial(_launch, spec, launch, cluster.host))


def open_started(spec: GroupSpec, begin: Callable[[WorkerLog], Started]) -> ProcessGroup:
    """Make each worker that `begin` starts build its object."""
    end = time.monotonic() + spec.start_timeout_s
    bodies = [_pack_call((spec.factory,), kwargs) for kwargs in spec.kwargs_of_ranks()]
    spec.log_file.parent.mkdir(parents=True, exist_ok=True)
    worker_log = WorkerLog.begin_now(spec.log_file.absolute(), group_name=spec.name)
    with ExitStack() as undo:
        started = begin(worker_log)
        group = ProcessGroup(started, log=worker_log, close_timeout_s=spec.close_timeout_s)
        undo.callback(group.abandon)
        for link in started.links:
            link.on_span = spec.on_span
        asked = [link.ask(START, body) for link, body in zip(started.links, bodies, strict=True)]
        try:
            gather(asked, timeout_s=max(0.0, end - time.monotonic()))
        except WorkerHungError as error:
            raise WorkerHungError(f"{error}\n{group.report_hang()}") from None
        undo.pop_all()
    return group


def _launch(spec: GroupSpec, launch: Launch, host: str, log: WorkerLog) -> Started:
    """Return processes that have checked in. The listener's folder is of no use after that."""
    launchers: list[subprocess.Popen[bytes]] = []
    with (
        TemporaryDirectory(prefix="homeostat-") as folder,
        ExitStack() as undo,
    ):
        # After the reception has closed, which is enough to end those who have checked in.
        undo.callback(end_launchers, launchers, patience_s=0.5)
        listener = listener_in(Path(folder), spec.name, size=spec.size)
        with closing(Reception(listener, size=spec.size, log=log, kill=_kill_here)) as reception:
            ticket = Ticket(
                address=listener.address,
                key=listener.key.hex(),
                group_name=spec.name,
                size=spec.size,
                host=host,
                log_file=str(log.file),
            )
            launchers += launch(ticket, env=spec.env, folder=Path(folder))
            links = reception.links(launchers, timeout_s=spec.start_timeout_s)
        undo.pop_all()
    return Started(links, launchers, release=_nothing, describe_end=_describe_launcher)


def _kill_here(rank: int, pids: tuple[int, int]) -> None:
    kill_groups(pids)


def _nothing() -> None:
    pass


def _describe_launcher(index: int, code: int) -> str:
    return f"the launcher of its workers {describe_exit(code)}."


def _pack_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    return pack((args, dict(kwargs)))


class ProcessGroup:
    """A WorkerGroup of processes."""

    def __init__(self, started: Started, *, log: WorkerLog, close_timeout_s: float) -> None:
        self.name = log.group_name
        self.size = len(started.links)
        self._links = started.links
        self._started = started
        self._close_timeout_s = close_timeout_s
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._is_closed = False
        self._report: WorkerError | None = None
        self._kernel_kills_before = num_kernel_kills()
        self._death = threading.Event()
        for link in started.links:
            link.start(on_end=self._on_end, hold_back=self._hold_back)
        for index, process in enumerate(started.launchers):
            threading.Thread(target=self._watch, args=(index, process), daemon=True).start()

    def call(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Pending[Any]:
        assert 0 <= rank < self.size, f"{self.name} has {self.size} workers, no rank {rank}"
        return self._ask([rank], method, [_pack_call(args, kwargs)])[0]

    def call_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Pending[Any]]:
        return self._ask(range(self.size), method, [_pack_call(args, kwargs)] * self.size)

    def call_each(self, method: str, per_rank: Sequence[tuple[Any, ...]], /) -> list[Pending[Any]]:
        return self._ask(range(self.size), method, [_pack_call(args, {}) for args in per_rank])

    def health(self) -> str | None:
        late = [one for link in self._links for one in link.overdue()]
        return str(self._report) if self._report else describe_overdue(late) or None

    def report_hang(self) -> str:
        for link in self._links:
            link.ask_for_report()
        end = time.monotonic() + REPORT_SECONDS
        reports = {
            link.rank: link.report(timeout_s=max(0.0, end - time.monotonic()))
            for link in self._links
        }
        return report_hang(self.name, reports, folder=self._links[0].log.file.parent)

    def close(self) -> None:
        """Ask, with `close_timeout_s`; then SIGKILL: workers leave SIGTERM to their controller."""
        with self._lock:
            first, self._is_closed = not self._is_closed, True
        if not first:
            return
        if self._report is None:
            self._ask_to_close()
        self.abandon()

    def abandon(self) -> None:
        """End the workers without asking them."""
        with self._lock:
            self._is_closed = True
        self._end()
        # A waiting caller should learn how its worker ended, which is about to be reported.
        last = time.monotonic() + HOLD_BACK_SECONDS
        while any(link.is_awaited for link in self._links) and time.monotonic() < last:
            time.sleep(0.01)
        for link in self._links:
            link.refuse(self._report or WorkerError(f"{self.name}: the group is closed."))

    def _ask(
        self, ranks: Sequence[int], method: str, bodies: Sequence[bytes]
    ) -> list[Pending[Any]]:
        if self._is_closed:
            raise WorkerError(f"{self.name}: the group is closed, {method!r} cannot be called.")
        return [
            self._links[rank].ask(method, body) for rank, body in zip(ranks, bodies, strict=True)
        ]

    def _ask_to_close(self) -> None:
        asked = []
        for link in self._links:
            # The process may have died just now.
            with suppress(WorkerError):
                asked.append(link.ask(CLOSE, _pack_call((), {})))
        self._wait_for_ends(self._close_timeout_s)
        for one in asked:
            error = one.future.exception() if one.future.done() else None
            if error is not None:
                log.warning("%s: closing went wrong: %s", self.name, error)

    def _hold_back(self) -> None:
        """Wait a while for a rank's death: if a rank died, that broke the others' collectives and
        is the cause.
        """
        if self.size > 1:
            self._death.wait(HOLD_BACK_SECONDS)

    def _watch(self, index: int, launcher: Process) -> None:
        """End the group with a launcher that was killed: its workers would be left behind."""
        code = launcher.wait()
        if not self._death.wait(HOLD_BACK_SECONDS):
            end = f"{self.name}: {self._started.describe_end(index, code)}"
            words = self._links[min(index, self.size - 1)].log.last_words(index)
            self._die(WorkerDiedError(end + words))

    def _on_end(self, link: RankLink) -> None:
        report = self._report_of(link)
        if self._is_closed:
            link.refuse(WorkerError(str(report)))
        else:
            self._die(report)

    def _report_of(self, link: RankLink) -> WorkerDiedError:
        """Describe how a rank ended, in the class of error that says why."""
        words = link.log.last_words(link.rank)
        machines = self._started.machines
        where = f" It ran on {machines[link.rank]}." if machines else ""
        text = f"{self.name} rank {link.rank} {describe_exit(link.exit_code)}.{where}{words}"
        kills = num_kernel_kills() - self._kernel_kills_before
        if is_death_of_memory(link.exit_code, words, kernel_kills=kills):
            return WorkerOutOfMemoryError(text)
        return WorkerDiedError(text)

    def _die(self, report: WorkerDiedError) -> None:
        with self._lock:
            if self._is_closed or self._report is not None:
                return
            self._report = report
        for link in self._links:
            link.refuse(report)
        self._death.set()
        self._end()

    def _end(self) -> None:
        """End all ranks. Callers come one at a time: the second finds it done."""
        with self._ending:
            for link in self._links:
                if not link.ended.is_set():
                    link.signal(signal.SIGKILL)
            self._wait_for_ends(KILL_SECONDS)
            for link in self._links:
                if not link.ended.is_set():
                    link.kill()
                link.hang_up()
            end_launchers(self._started.launchers, patience_s=END_SECONDS)
            self._started.release()

    def _wait_for_ends(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        for link in self._links:
            link.ended.wait(max(0.0, end - time.monotonic()))
