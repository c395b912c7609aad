"""The seat of one rank: a process that an outer launcher started, and that keeps a worker.

    store: where the controller listens -> check in -> start workers, pass signals on ... -> END

Nothing is computed here. The controller, rank 0's process, asks for a worker whenever it opens a
group, so that ranks can be restarted from a checkpoint without the launcher. Rank 0's process has a
seat as well, in a thread.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from homeostat.errors import WorkerError
from homeostat.workers.channel import Channel, ChannelClosedError, dial
from homeostat.workers.child import FOR_THE_CONTROLLER
from homeostat.workers.hosting import attempt
from homeostat.workers.keeper import Keeper
from homeostat.workers.outside import Launch
from homeostat.workers.wire import pack, unpack

if TYPE_CHECKING:
    from torch.distributed import TCPStore

# The call that ends a seat; it is no method of a Keeper.
END = "(end)"


@dataclass(frozen=True, slots=True)
class Arrival:
    """The first message of a seat: which rank it is for, and where. It is JSON on the wire.

    `address` is that of its machine, as the controller's end of the connection sees it.
    """

    rank: int
    local_rank: int
    local_size: int
    address: str
    machine: str

    def packed(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpacked(cls, message: bytes) -> Arrival:
        """Return the message of a process of any version of homeostat.

        What another version adds is left out, because the versions are compared once all ranks are
        there. Raises ValueError if anything is missing, or is not of its type.
        """
        said = json.loads(message)
        wanted = {"rank": int, "local_rank": int, "local_size": int, "address": str, "machine": str}
        if not isinstance(said, dict):
            raise ValueError("it is not an object")
        for name, kind in wanted.items():
            if type(said.get(name)) is not kind:
                raise ValueError(f"its {name} is {said.get(name)!r:.40}")
        return cls(**{name: said[name] for name in wanted})


@dataclass(frozen=True, slots=True)
class Meeting:
    """The address at which the controller listens for seats, and the key that they must know."""

    address: str
    key: str

    def publish(self, launch: Launch, store: TCPStore) -> None:
        store.set(_name(launch), json.dumps(asdict(self)))

    @classmethod
    def found(cls, launch: Launch, store: TCPStore) -> Meeting:
        """Wait until the controller publishes its address."""
        return cls(**json.loads(store.get(_name(launch))))


def serve_seat(launch: Launch, *, timeout_s: float) -> int:
    """Keep the workers of a rank until the controller ends. Returns the exit code.

    Raises WorkerError if the controller is not found within `timeout_s`.
    """
    store = open_store(launch, timeout_s=timeout_s)
    try:
        meeting = Meeting.found(launch, store)
        channel, address = check_in(meeting)
    except (OSError, RuntimeError) as error:
        raise WorkerError(
            f"rank {launch.rank}: the controller, rank 0 at {launch.address}, was not found within "
            f"{timeout_s:.4g} s (cluster.start_timeout_s): {_first_line(error)}"
        ) from None
    # From now on the controller decides what a signal to the job means.
    for number in FOR_THE_CONTROLLER:
        signal.signal(number, _leave_to_the_controller)
    if sit(launch, channel, address):
        return 0
    print(
        f"rank {launch.rank}: the controller, rank 0 at {launch.address}, is gone; its last lines "
        "say why.",
        file=sys.stderr,
    )
    return 1


def open_store(launch: Launch, *, timeout_s: float) -> TCPStore:
    """Open the store in which ranks find each other. Rank 0 serves it unless the launcher does.

    Raises WorkerError.
    """
    from torch.distributed import TCPStore

    serves = launch.rank == 0 and not launch.has_store
    try:
        return TCPStore(
            launch.address,
            launch.port,
            is_master=serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError, OSError) as error:
        does = "cannot listen" if serves else "finds no store"
        raise WorkerError(
            f"rank {launch.rank} {does} at {launch.address}:{launch.port} "
            f"(MASTER_ADDR, MASTER_PORT): {_first_line(error)}"
        ) from None


def check_in(meeting: Meeting) -> tuple[Channel, str]:
    """Return a channel to the controller, and the address of this machine on the way there."""
    host, _, port = meeting.address.rpartition("://")[2].rpartition(":")
    with socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM
    ) as out:
        # Nothing is sent: this only asks which interface leads there.
        out.connect((host, int(port)))
        address = str(out.getsockname()[0])
    return dial(meeting.address, bytes.fromhex(meeting.key)), address


def sit(launch: Launch, channel: Channel, address: str) -> bool:
    """Follow the controller's requests. Returns whether it announced its end; else it is gone."""
    arrival = Arrival(
        launch.rank, launch.local_rank, launch.local_size, address, socket.gethostname()
    )
    keepers: dict[int, Keeper] = {}
    sending = threading.Lock()
    try:
        channel.send(arrival.packed())
        while True:
            call_id, keeper, method, args = unpack(channel.receive())
            if method == END:
                return True
            kept = keepers.setdefault(keeper, Keeper())
            call = (channel, sending, call_id, kept, method, args)
            threading.Thread(target=_answer, args=call, daemon=True).start()
    except ChannelClosedError:
        return False
    finally:
        # Its workers, if there are any, end with their own channels to the controller.
        channel.close()


def _answer(
    channel: Channel,
    sending: threading.Lock,
    call_id: int,
    keeper: Keeper,
    method: str,
    args: tuple[Any, ...],
) -> None:
    outcome = attempt(lambda: getattr(keeper, method)(*args))
    try:
        with sending:
            channel.send(pack((call_id, outcome)))
    except ChannelClosedError:
        # The thread that receives notices it, too.
        pass


def _leave_to_the_controller(number: int, frame: FrameType | None) -> None:
    pass


def _name(launch: Launch) -> str:
    return f"homeostat/{launch.name}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
