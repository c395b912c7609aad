"""Use the processes that an outer torchrun or srun started as seats of trainer ranks.

    with seats_opened(launch):  listen, say where in the store; a seat for rank 0 in a thread
        open_group(cluster, spec):  all seats -> child.py on each -> channels -> ProcessGroup

It is Ray's launcher with seats in place of actors. A seat that is lost cannot be replaced: opening
a group fails then, and the launcher has to start the command again, which resumes the run.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from homeostat.config.cluster import AnyCluster
from homeostat.errors import ConfigError, Problem, RunDirWriteError, WorkerDiedError, WorkerError
from homeostat.workers.channel import Channel, ChannelClosedError, TcpListener
from homeostat.workers.child import Ticket
from homeostat.workers.hosting import Failure
from homeostat.workers.keeper import Site
from homeostat.workers.kept import KeptProcess
from homeostat.workers.launchers import end_launchers
from homeostat.workers.log import WorkerLog
from homeostat.workers.machine import differing
from homeostat.workers.network import free_port, own_address
from homeostat.workers.opening import launcher_opened
from homeostat.workers.outside import Launch
from homeostat.workers.processes import ProcessGroup, Started, open_started
from homeostat.workers.reception import GREETING_SECONDS, LOOK_ROUND_SECONDS, Reception
from homeostat.workers.seat import END, Arrival, Meeting, check_in, open_store, sit
from homeostat.workers.spec import GroupSpec
from homeostat.workers.wire import pack, unpack

# How long processes have to end by themselves when a start has failed.
PATIENCE_SECONDS = 0.5

log = logging.getLogger(__name__)


@contextmanager
def seats_opened(launch: Launch | None, *, timeout_s: float) -> Iterator[None]:
    """Place trainer ranks on the seats of a launch for the duration of the block, if there is one.

    Raises WorkerError if no other rank could find this one.
    """
    if launch is None or launch.size == 1:
        yield
        return
    with (
        closing(Seats(launch, timeout_s=timeout_s)) as seats,
        launcher_opened("outside", seats.open_group),
    ):
        yield


class Seat:
    """The controller's end of one seat: calls of its Keepers, and its loss."""

    def __init__(self, arrival: Arrival, channel: Channel) -> None:
        self.arrival = arrival
        self._channel = channel
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._loss: WorkerDiedError | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def __str__(self) -> str:
        return f"the seat of rank {self.arrival.rank} on {self.arrival.machine}"

    def call(self, keeper: int, method: str, *args: Any) -> Future[Any]:
        """Call a method of a Keeper, which is made when it is first called."""
        future: Future[Any] = Future()
        with self._lock:
            if self._loss is not None:
                future.set_exception(self._loss)
                return future
            number = next(self._numbers)
            self._pending[number] = future
            with contextlib.suppress(ChannelClosedError):
                self._channel.send(pack((number, keeper, method, args)))
        return future

    def end(self) -> None:
        """Let its process end."""
        with contextlib.suppress(ChannelClosedError), self._lock:
            self._channel.send(pack((-1, -1, END, ())))

    def hang_up(self) -> None:
        self._channel.close()

    def _read(self) -> None:
        with contextlib.suppress(ChannelClosedError):
            while True:
                number, outcome = unpack(self._channel.receive())
                with self._lock:
                    future = self._pending.pop(number)
                if isinstance(outcome, Failure):
                    future.set_exception(outcome.error(str(self)))
                else:
                    future.set_result(outcome)
        with self._lock:
            self._loss = WorkerDiedError("its process, or its machine, ended")
            lost, self._pending = self._pending, {}
        for future in lost.values():
            future.set_exception(self._loss)


class Seats:
    """All seats of a launch. Ranks arrive in any order, while the controller does other things."""

    def __init__(self, launch: Launch, *, timeout_s: float) -> None:
        self.launch = launch
        # Kept: seats look into it, and where rank 0 serves it, it ends with this object.
        self._store = open_store(launch, timeout_s=timeout_s)
        try:
            self.address = own_address(launch.address)
            self._listener = TcpListener(self.address, backlog=launch.size)
        except OSError as error:
            raise WorkerError(
                f"rank 0 cannot listen at {launch.address} (MASTER_ADDR), where other ranks look "
                f"for it: {error}"
            ) from None
        self._seats: dict[int, Seat] = {}
        self._changed = threading.Condition()
        self._keepers = itertools.count()
        self._is_closed = False
        self._door = threading.Thread(target=self._admit_all, daemon=True)
        self._door.start()
        meeting = Meeting(self._listener.address, self._listener.key.hex())
        own = check_in(meeting)
        threading.Thread(target=sit, args=(launch, *own), daemon=True).start()
        meeting.publish(launch, self._store)

    def open_group(self, cluster: AnyCluster, spec: GroupSpec) -> ProcessGroup:
        """Start one worker on each seat."""
        assert spec.size == self.launch.size, (spec.name, spec.size, self.launch)
        return open_started(spec, partial(self._begin, spec))

    def close(self) -> None:
        """Let all seats end, and admit no more."""
        self._is_closed = True
        self._door.join()
        self._listener.close()
        for seat in self._seats.values():
            seat.end()
        for seat in self._seats.values():
            seat.hang_up()

    def _begin(self, spec: GroupSpec, worker_log: WorkerLog) -> Started:
        end = time.monotonic() + spec.start_timeout_s
        seats = self._all_seats(spec)
        keeper = next(self._keepers)
        _require_alike(spec, seats, keeper, folder=worker_log.file.parent, end=end)
        processes: list[KeptProcess] = []
        with ExitStack() as undo:
            undo.callback(end_launchers, processes, patience_s=PATIENCE_SECONDS)
            listener = TcpListener(self.address, backlog=2 * spec.size)
            kill = partial(_kill, seats, keeper)
            with closing(
                Reception(listener, size=spec.size, log=worker_log, kill=kill)
            ) as reception:
                self._launch(spec, seats, keeper, listener=listener, log=worker_log, end=end)
                processes += [_kept(seat, keeper, worker_log) for seat in seats]
                links = reception.links(processes, timeout_s=max(0.01, end - time.monotonic()))
            undo.pop_all()
        return Started(
            links,
            processes,
            release=_nothing,
            describe_end=lambda index, code: processes[index].describe_end(),
            machines=[seat.arrival.machine for seat in seats],
        )

    def _all_seats(self, spec: GroupSpec) -> list[Seat]:
        """Wait until every rank has a seat, in the order of ranks."""
        size = self.launch.size
        with self._changed:
            self._changed.wait_for(lambda: len(self._seats) == size, spec.start_timeout_s)
            absent = [rank for rank in range(size) if rank not in self._seats]
            if absent:
                raise WorkerError(
                    f"{spec.name}: rank {', '.join(map(str, absent))} of {size} did not check in "
                    f"within {spec.start_timeout_s:.4g} s (cluster.start_timeout_s). "
                    f"{self.launch.by} started them; can they reach "
                    f"{self._listener.address.removeprefix('tcp://')}?"
                )
            return [self._seats[rank] for rank in range(size)]

    def _launch(
        self,
        spec: GroupSpec,
        seats: list[Seat],
        keeper: int,
        *,
        listener: TcpListener,
        log: WorkerLog,
        end: float,
    ) -> None:
        site = Site.of_this_process()
        meeting = {"MASTER_ADDR": self.address, "MASTER_PORT": str(free_port(self.address))}
        asked = []
        for rank, seat in enumerate(seats):
            at = seat.arrival
            ticket = Ticket(
                address=listener.address,
                key=listener.key.hex(),
                group_name=spec.name,
                size=spec.size,
                host=at.address,
                log_file=str(log.file),
                rank=rank,
                local_rank=at.local_rank,
                sends_log=True,
            )
            own = {"RANK": str(rank), "WORLD_SIZE": str(spec.size)}
            own |= {"LOCAL_RANK": str(at.local_rank), "LOCAL_WORLD_SIZE": str(at.local_size)}
            asked.append(seat.call(keeper, "launch", ticket, {**spec.env, **meeting, **own}, site))
        _answers(spec, seats, asked, end=end)

    def _arrival(self, message: bytes) -> Arrival:
        """Raise ValueError for a message that no rank of this launch would send."""
        arrival = Arrival.unpacked(message)
        if not 0 <= arrival.rank < self.launch.size:
            raise ValueError(f"there is no rank {arrival.rank} of {self.launch.size}")
        return arrival

    def _admit_all(self) -> None:
        while not self._is_closed:
            channel = self._listener.accept(timeout_s=LOOK_ROUND_SECONDS)
            if channel is None:
                continue
            try:
                arrival = self._arrival(channel.receive(timeout_s=GREETING_SECONDS))
            except OSError:
                # The process died while it checked in.
                channel.close()
                continue
            except ValueError as error:
                channel.close()
                log.warning(
                    "a process that checked in as a rank was turned away, because its message "
                    "cannot be read (%s). Is the same version of homeostat installed everywhere?",
                    error,
                )
                continue
            with self._changed:
                self._seats[arrival.rank] = Seat(arrival, channel)
                self._changed.notify_all()


def _require_alike(
    spec: GroupSpec, seats: list[Seat], keeper: int, *, folder: Path, end: float
) -> None:
    """Raise ConfigError, rank by rank, where a machine has other versions than rank 0's, or does
    not see the run's folder, to which ranks save.
    """
    token = secrets.token_hex(8)
    try:
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".homeostat-shared-") as file:
            file.write(token)
            file.flush()
            asked = [seat.call(keeper, "look", file.name) for seat in seats]
            found = _answers(spec, seats, asked, end=end)
    except OSError as error:
        raise RunDirWriteError(f"{folder} cannot be written: {error.strerror}.") from error
    ours = found[0][0]
    problems: list[Problem] = []
    for seat, (versions, text) in zip(seats, found, strict=True):
        who = f"rank {seat.arrival.rank} on {seat.arrival.machine}"
        hint = "Install the same versions on every machine."
        problems += [Problem(who, f"{words}.", hint) for words in differing(ours, versions)]
        if text != token:
            why = f"the run folder {folder}, to which ranks save, is not visible there."
            hint = "Set runs_dir to a folder on a file system that all machines share."
            problems.append(Problem(who, why, hint))
    if problems:
        raise ConfigError(problems)


def _answers(
    spec: GroupSpec, seats: list[Seat], asked: Sequence[Future[Any]], *, end: float
) -> list[Any]:
    """Return the answers of all seats. Raises WorkerError for one that failed or is late."""
    wait_for(asked, timeout=max(0.01, end - time.monotonic()))
    for seat, one in zip(seats, asked, strict=True):
        error = one.exception(timeout=0) if one.done() else "no answer in time"
        if error is not None:
            raise WorkerError(f"{spec.name}: {seat} did not start its worker: {error}")
    return [one.result(timeout=0) for one in asked]


def _kept(seat: Seat, keeper: int, log: WorkerLog) -> KeptProcess:
    where = seat.arrival
    return KeptProcess(
        seat.call(keeper, "watch"),
        signal=partial(seat.call, keeper, "signal"),
        name=f"the process of rank {where.rank} on {where.machine}",
        keeper=str(seat),
        log=log,
    )


def _kill(seats: list[Seat], keeper: int, rank: int, pids: tuple[int, int]) -> None:
    """Kill what a guardian can no longer end, on whatever machine it is."""
    seats[rank].call(keeper, "kill_groups", pids)


def _nothing() -> None:
    pass
