"""Parts of worker groups: how errors travel, who is let in, what is read back from logs."""

from __future__ import annotations

import inspect
import pickle
import threading
from multiprocessing import AuthenticationError
from pathlib import Path

import pytest

from homeostat import errors
from homeostat.config.cluster import LOOPBACK
from homeostat.errors import ConfigError, HomeostatError, Problem, WorkerError
from homeostat.workers.channel import dial
from homeostat.workers.child import GUARDIAN, WORKER, Ticket
from homeostat.workers.hosting import Failure, attempt
from homeostat.workers.log import WorkerLog
from homeostat.workers.reception import Reception, listener_in

OURS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, HomeostatError)
]


def raised(error: Exception) -> HomeostatError:
    def act() -> None:
        raise error

    failure = attempt(act)
    assert isinstance(failure, Failure)
    return pickle.loads(pickle.dumps(failure)).error("trainer rank 0: 'act'")


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_of_ours_keeps_its_class_and_its_text(kind: type[HomeostatError]) -> None:
    error = ConfigError([Problem("a", "b")]) if kind is ConfigError else kind("what and why")
    error.add_note("a note")
    back = raised(error)
    assert type(back) is kind
    assert str(back) == str(error)
    assert back.__notes__[0] == "a note"
    assert back.__notes__[-1].startswith("raised by trainer rank 0: 'act':\nTraceback")


def test_the_cause_of_a_foreign_error_is_told() -> None:
    error = ValueError("outer")
    error.__cause__ = KeyError("inner")
    back = raised(error)
    assert type(back) is WorkerError
    assert str(back).startswith("trainer rank 0: 'act' raised ValueError: outer\n")
    assert "KeyError: 'inner'" in str(back)


def test_only_who_knows_the_key_is_let_in(tmp_path: Path) -> None:
    log = WorkerLog.begin_now(tmp_path / "log", group_name="engine")
    listener = listener_in(tmp_path, "engine", size=1)
    reception = Reception(listener, size=1, log=log, kill=lambda rank, pids: None)
    refused = threading.Event()

    def intrude() -> None:
        try:
            dial(reception.listener.address, b"guessed")
        except AuthenticationError:
            refused.set()

    def check_in() -> None:
        address, key = reception.listener.address, reception.listener.key.hex()
        ticket = Ticket(address, key, "engine", 1, LOOPBACK, str(log.file))
        channels.extend(ticket.check_in(part, rank=0) for part in (WORKER, GUARDIAN))

    channels: list[object] = []
    threads = [threading.Thread(target=target) for target in (intrude, check_in)]
    for thread in threads:
        thread.start()
        # One after the other: a stranger must not stop those who come after it.
        reception._admit()
    (link,) = reception.links([], timeout_s=10)
    for thread in threads:
        thread.join(10)
    reception.close()
    assert refused.is_set()
    assert link.rank == 0


def test_a_socket_path_that_is_too_long_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="Set TMPDIR to a short path"):
        listener_in(tmp_path / ("x" * 120), "engine", size=1)


def test_last_words_are_the_ranks_own_or_the_launchers(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("[engine 0] of an earlier group\n")
    log = WorkerLog.begin_now(file, group_name="engine")
    assert log.last_words(0) == f"\nIt wrote nothing to {file}."
    with file.open("a") as lines:
        lines.write("[engine 10] ten\nthe launcher\n")
        lines.writelines(f"[engine 1] line {n}\n" for n in range(20))
    assert log.last_words(0).splitlines()[2:] == ["the launcher"]
    assert log.last_words(1).splitlines()[2:] == [f"line {n}" for n in range(8, 20)]
