"""Processes that compute parts of a list: in order, with their errors, and never a hang."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
from tests.support.forks import real_helpers

from homeostat.data import helpers
from homeostat.data.helpers import HelperDiedError, HelperHungError, computed


@pytest.fixture(autouse=True)
def processes_are_started_as_outside_of_tests():
    with real_helpers():
        yield


def square(number: int) -> int:
    return number * number


def fails_at_three(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return number


def megabytes(number: int) -> bytes:
    return bytes(8_000_000)


def test_results_come_in_order_and_nothing_is_left_behind():
    assert list(computed(square, range(40), num_processes=2)) == [n * n for n in range(40)]
    assert multiprocessing.active_children() == []


def test_an_error_of_the_work_is_raised_here():
    with pytest.raises(ValueError, match="three"):
        list(computed(fails_at_three, range(10), num_processes=2))
    assert multiprocessing.active_children() == []


def test_one_that_is_killed_in_the_middle_of_its_answer_is_an_error():
    results = computed(megabytes, range(20), num_processes=2)
    next(results)
    victim, _ = multiprocessing.active_children()
    # Both are writing more than a pipe holds, and wait for the rest to be read.
    deadline = time.monotonic() + 60
    while _is_running(victim.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(HelperDiedError):
        list(results)
    assert multiprocessing.active_children() == []


def test_one_that_is_stopped_is_an_error_after_a_while(monkeypatch):
    pipes = []
    limit_reads = helpers._limit_reads
    monkeypatch.setattr(helpers, "_limit_reads", lambda pipe, seconds: pipes.append(pipe))
    monkeypatch.setattr(helpers, "_END_SECONDS", 0.1)
    results = computed(megabytes, range(20), num_processes=1)
    next(results)
    (victim,) = multiprocessing.active_children()
    os.kill(victim.pid, signal.SIGSTOP)
    # Only now is it short: the start takes what it takes on a busy machine.
    (pipe,) = pipes
    limit_reads(pipe, 0.5)
    with pytest.raises(HelperHungError):
        list(results)
    assert multiprocessing.active_children() == []


def _is_running(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0] == "R"
