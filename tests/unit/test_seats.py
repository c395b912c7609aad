"""Trainer ranks on processes that were started from outside: the way there, and what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.forks import real_workers
from tests.support.patience import eventually
from tests.support.seats import keep, launch_of, seated

from homeostat.config.cluster import TorchrunCluster
from homeostat.config.ranks import LOOPBACK
from homeostat.errors import ConfigError, WorkerError
from homeostat.workers.channel import dial
from homeostat.workers.group import gather
from homeostat.workers.network import free_port
from homeostat.workers.opening import launcher_opened, open_group
from homeostat.workers.processes import ProcessGroup
from homeostat.workers.seat import serve_seat
from homeostat.workers.seats import Seat, Seats, seats_opened
from homeostat.workers.spec import GroupSpec

MAKE = "tests.support.worker_objects:make"
CLUSTER = TorchrunCluster(type="torchrun", processes=2, nodes=2)


def spec(folder: Path, **changes: object) -> GroupSpec:
    fields = {"factory": MAKE, "kind": "trainer", "name": "trainer", "size": 2, **changes}
    return GroupSpec(log_file=folder / "workers.log", **fields)  # type: ignore[arg-type]


def opened(seats: Seats, folder: Path, **changes: object) -> ProcessGroup:
    with launcher_opened("outside", seats.open_group):
        group = open_group(CLUSTER, spec(folder, **changes))
    assert isinstance(group, ProcessGroup)
    return group


def test_ranks_have_their_places_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    with real_workers(), seated(2) as seats:
        group = opened(seats, tmp_path)
        places = gather(group.call_all("environment", *names), timeout_s=20)
        assert places == [[str(rank), "2", "0", "1", LOOPBACK] for rank in range(2)]
        pid = group.call(1, "about").result(timeout_s=20)["pid"]
        waiting = group.call(0, "sleep", 600.0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"trainer rank 1 was ended by SIGKILL .* It ran on "):
            waiting.result(timeout_s=20)
        # The launcher is not asked: the seats start other workers.
        again = opened(seats, tmp_path)
        again.call(1, "say", "from the other node").result(timeout_s=20)
        again.close()
    assert "[trainer 1] from the other node" in (tmp_path / "workers.log").read_text()


def test_a_seat_that_is_lost_ends_the_group_and_cannot_be_replaced(tmp_path: Path) -> None:
    with real_workers(), seated(2) as seats:
        group = opened(seats, tmp_path)
        waiting = group.call(0, "sleep", 600.0)
        seats._seats[1].end()
        with pytest.raises(WorkerError, match=r"the seat of rank 1 on .* is gone"):
            waiting.result(timeout_s=20)
        with pytest.raises(WorkerError, match=r"rank 1 on .* did not start its worker: its p"):
            opened(seats, tmp_path)


def test_a_machine_unlike_the_controllers_is_named_before_a_rank_starts_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's has another torch, and a run folder of its own."""
    plain = Seat.call

    def call(self: Seat, keeper: int, method: str, *args: Any) -> Future[Any]:
        answer = plain(self, keeper, method, *args)
        if (method, self.arrival.rank) == ("look", 1):
            versions, _ = answer.result(timeout=20)
            other = replace(versions, packages={**versions.packages, "torch": "1.0"})
            answer = Future()
            answer.set_result((other, None))
        return answer

    monkeypatch.setattr(Seat, "call", call)
    with seated(2) as seats, pytest.raises(ConfigError) as caught:
        opened(seats, tmp_path)
    versions, folder = caught.value.problems
    assert versions.place.startswith("rank 1 on ")
    assert versions.message.startswith("torch 1.0, the controller has ")
    assert folder.message.startswith(f"the run folder {tmp_path}, to which ranks save, is not v")
    assert list(tmp_path.iterdir()) == []


def test_who_checks_in_with_other_words_keeps_no_rank_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = {"rank": 1, "local_rank": 0, "local_size": 1, "address": LOOPBACK, "machine": "there"}
    lacking = {name: value for name, value in said.items() if name != "address"}
    port = free_port(LOOPBACK)
    with closing(Seats(launch_of(0, 2, port=port), timeout_s=20.0)) as seats:
        listener, calls = seats._listener, []
        for words in ([], lacking, said | {"rank": 7}, said | {"newer": 1}):
            calls.append(dial(listener.address, listener.key))
            calls[-1].send(json.dumps(words).encode())
        # Another version may say more: what is installed there is compared once all are in.
        assert eventually(lambda: sorted(seats._seats) == [0, 1])
        assert seats._seats[1].arrival.machine == "there"
        whys = [record.getMessage() for record in caplog.records]
        assert len([why for why in whys if "turned away" in why]) == 3
        for call in calls:
            call.close()


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    launch = launch_of(0, 3, port=free_port(LOOPBACK))
    with seats_opened(launch, timeout_s=20.0):
        thread = threading.Thread(target=keep, args=(launch_of(2, 3, port=launch.port),))
        thread.start()
        with pytest.raises(WorkerError, match=r"rank 1 of 3 did not check in within 0\.5 s .*srun"):
            open_group(CLUSTER, spec(tmp_path, size=3, start_timeout_s=0.5))
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_controller_that_does_not_come_is_named() -> None:
    with pytest.raises(WorkerError, match=r"rank 1 finds no store at 127\.0\.0\.1:\d+ \(MASTER_"):
        serve_seat(launch_of(1, 2, port=free_port(LOOPBACK)), timeout_s=0.3)


def test_a_start_without_ranks_is_left_alone() -> None:
    with seats_opened(None, timeout_s=1.0), seats_opened(launch_of(0, 1, port=1), timeout_s=1.0):
        pass
