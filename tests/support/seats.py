"""Seats of a launch from outside, all of them in this process: rank 0's, and others in threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from homeostat.config.ranks import LOOPBACK
from homeostat.workers.network import free_port
from homeostat.workers.outside import Launch
from homeostat.workers.seat import Meeting, check_in, open_store, sit
from homeostat.workers.seats import Seats


def launch_of(rank: int, size: int, *, port: int) -> Launch:
    """Every rank on a separate node, as srun would start them."""
    return Launch("srun", rank, size, 0, 1, size, LOOPBACK, port, "7.0/0", has_store=False)


@contextmanager
def seated(size: int) -> Iterator[Seats]:
    """Seats of so many ranks, which end with the block."""
    port = free_port(LOOPBACK)
    with closing(Seats(launch_of(0, size, port=port), timeout_s=20.0)) as seats:
        others = [launch_of(rank, size, port=port) for rank in range(1, size)]
        threads = [threading.Thread(target=keep, args=(one,)) for one in others]
        for thread in threads:
            thread.start()
        yield seats
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive(), "a seat outlives its controller"


def keep(launch: Launch) -> bool:
    """Do what `serve_seat` does, in a thread, where signals cannot be handled."""
    meeting = Meeting.found(launch, open_store(launch, timeout_s=20.0))
    return sit(launch, *check_in(meeting))
