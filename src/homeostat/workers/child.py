"""A worker process: `python -m homeostat.workers.child`. Standard library only until its factory.

Every launcher starts these two processes:

    guardian   runs no foreign code. Copies the worker's output to the log, line by line with its
               prefix; passes on the controller's signals; reports on a worker that hangs, and how
               it ended; ends what it started. When the controller is gone, even by kill -9, it
               kills the worker.
    worker     leads a separate process group: builds the object, then answers one call after
               another.

Each has a channel to the controller, at an address that the environment names. The worker may hang
in C code with the GIL held; the guardian can still look at it and end it. SIGINT, SIGTERM and
SIGUSR1 from others are left to the controller: ctrl-C reaches every process of a terminal, a
scheduler that wants its nodes back signals every process of a job, and only the controller knows
what must be saved first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from types import FrameType
from typing import BinaryIO

from homeostat.workers.activity import ActivityRecord
from homeostat.workers.channel import Channel, ChannelClosedError, dial
from homeostat.workers.context import WorkerContext
from homeostat.workers.hosting import CLOSE, Failure, Host, attempt
from homeostat.workers.reports import STACK_SIGNAL, StackFile, WorkerReport, report_on
from homeostat.workers.wire import Greeting, pack, unpack

TICKET = "HOMEOSTAT_WORKER"
GUARDIAN, WORKER = "guardian", "worker"
# A message to a guardian that is not the number of a signal: report on the worker.
REPORT = "report"
# Signals that reach all processes of a terminal or a job, and are meant for the controller.
FOR_THE_CONTROLLER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
MAX_LINE_BYTES = 2**16
# Processes that the worker started may hold its output open; they get a moment to end by
# themselves.
DRAIN_SECONDS = 0.5
TIDY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """The facts that a launched process gets from the environment. Under torchrun only torchrun
    knows the rank.

    `address` and `key` are those of the listener at which the process checks in; `host` is the
    address of this machine at which others reach it. With `sends_log` the log file is on the
    controller's machine, and the worker's lines are sent there. `local_rank` is the rank where all
    are on one machine.
    """

    address: str
    key: str
    group_name: str
    size: int
    host: str
    log_file: str
    rank: int | None = None
    local_rank: int | None = None
    sends_log: bool = False

    def environment(self) -> dict[str, str]:
        return {TICKET: json.dumps(asdict(self))}

    def check_in(self, part: str, *, rank: int) -> Channel:
        """Open a channel to the controller, and identify this process."""
        channel = dial(self.address, bytes.fromhex(self.key))
        channel.send(Greeting(part, rank, os.getpid()).packed())
        return channel


def main() -> None:
    ticket = Ticket(**json.loads(os.environ.pop(TICKET)))
    rank = int(os.environ["RANK"]) if ticket.rank is None else ticket.rank
    # A handler, not SIG_IGN: programs that the worker starts would inherit that.
    for number in FOR_THE_CONTROLLER:
        signal.signal(number, _leave_to_the_controller)
    # The signals are blocked from the launch until here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_CONTROLLER)
    record, stacks = ActivityRecord(), StackFile()
    output, theirs = os.pipe()
    worker = os.fork()
    # Both processes set it, because either may run first.
    with contextlib.suppress(OSError):
        os.setpgid(worker, 0)
    if worker:
        os.close(theirs)
        look = partial(report_on, worker, rank=rank, record=record, stacks=stacks)
        sys.exit(_guard(worker, ticket, rank=rank, output=output, look=look))
    os.close(output)
    for stream in (1, 2):
        os.dup2(theirs, stream)
    os.close(theirs)
    _serve(ticket, rank=rank, record=record, stacks=stacks)


def _leave_to_the_controller(number: int, frame: FrameType | None) -> None:
    pass


def _serve(ticket: Ticket, *, rank: int, record: ActivityRecord, stacks: StackFile) -> None:
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=stacks.fileno(), all_threads=True)
    record.say_that_it_prints_stacks()
    local_rank = rank if ticket.local_rank is None else ticket.local_rank
    context = WorkerContext(
        rank, ticket.size, local_rank, ticket.group_name, ticket.host, record=record
    )
    host = Host(context)
    with contextlib.closing(ticket.check_in(WORKER, rank=rank)) as channel:
        method = ""
        # A closed channel is the controller's end, which the guardian sees too.
        with contextlib.suppress(ChannelClosedError):
            while method != CLOSE:
                call_id, method = unpack(channel.receive())
                with record.call.lasting(method):
                    is_good, answer = _answer(host, method, channel.receive())
                channel.send(pack((call_id, is_good)))
                channel.send(answer)


def _answer(host: Host, method: str, body: bytes) -> tuple[bool, bytes]:
    """Run a call. If unpacking its arguments or packing its result fails, the call has failed."""

    def run() -> bytes:
        args, kwargs = unpack(body)
        return pack(host.run(method, args, kwargs))

    outcome = attempt(run)
    if isinstance(outcome, Failure):
        return False, pack(outcome)
    return True, outcome


def _guard(
    worker: int, ticket: Ticket, *, rank: int, output: int, look: Callable[[], WorkerReport]
) -> int:
    """Watch the worker until it ends. Returns the exit code that a shell would give it.

    `look` makes the report that the controller may ask for.
    """
    prefix = f"[{ticket.group_name} {rank}] ".encode()
    with contextlib.closing(ticket.check_in(GUARDIAN, rank=rank)) as channel:
        # The log's lines, reports and the exit code are sent by three threads.
        sending = threading.Lock()
        log = _SentLog(channel, sending) if ticket.sends_log else _log_file(ticket.log_file)
        pump = threading.Thread(target=_pump, args=(output, log, prefix), daemon=True)
        pump.start()
        obey = threading.Thread(target=_obey, args=(channel, worker, look, sending), daemon=True)
        obey.start()
        code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        pump.join(DRAIN_SECONDS)
        with contextlib.suppress(ChannelClosedError), sending:
            channel.send(pack(code))
        _end_the_rest(worker)
    return code if code >= 0 else 128 - code


def exit_code_of_worker(code: int) -> int:
    """Undo what `_guard` returns: a worker that was ended by a signal has its negative number."""
    return 128 - code if code > 128 else code


def _end_the_rest(group: int) -> None:
    """Kill the processes that the worker started, after Python's tracker had time to free shared
    memory.
    """
    end = time.monotonic() + TIDY_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(0.02)
        os.killpg(group, signal.SIGKILL)


def _log_file(path: str) -> BinaryIO:
    return open(path, "ab", buffering=0)


class _SentLog:
    """Sends what is written to the controller, which has the log file."""

    def __init__(self, channel: Channel, sending: threading.Lock) -> None:
        self._channel = channel
        self._sending = sending

    def write(self, line: bytes) -> None:
        with self._sending:
            self._channel.send(pack(line))

    def close(self) -> None:
        pass


def _pump(output: int, log: BinaryIO | _SentLog, prefix: bytes) -> None:
    with open(output, "rb") as lines, contextlib.closing(log):
        for line in iter(partial(lines.readline, MAX_LINE_BYTES), b""):
            # Continue to read even if the disk is full or the controller is gone; otherwise the
            # worker would hang in its next print.
            with contextlib.suppress(OSError):
                log.write(prefix + line.rstrip(b"\r\n") + b"\n")


def _obey(
    channel: Channel,
    worker: int,
    look: Callable[[], WorkerReport],
    sending: threading.Lock,
) -> None:
    """Follow the controller's requests: pass on a signal, or report on the worker.

    If the controller is gone, end the worker.
    """
    with contextlib.suppress(ChannelClosedError):
        while True:
            wanted = unpack(channel.receive())
            if wanted == REPORT:
                report = pack(look())
                with sending:
                    channel.send(report)
            else:
                _signal(worker, wanted)
    _signal(worker, signal.SIGKILL)


def _signal(worker: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, number)


if __name__ == "__main__":
    main()
