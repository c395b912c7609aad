"""Signals ask a run to stop: the first lets the step finish and be saved, the second ends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from homeostat.run.session.signals import StopRequest

ASKS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP]


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Have no signal ignored: a shell in the background, and nohup, start programs so."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ASKS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ASKS)
def test_the_first_signal_lets_the_step_finish_and_the_second_ends_at_once(
    number: signal.Signals,
) -> None:
    with StopRequest().listening() as stop:
        stop.let_steps_finish()
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.signal == number
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + number


def test_a_signal_before_the_first_step_ends_at_once() -> None:
    with StopRequest().listening() as stop, pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.requested


def test_a_run_that_was_asked_to_stop_does_not_set_up_again() -> None:
    with StopRequest().listening() as stop:
        stop.let_steps_finish()
        stop.end_at_once()
        stop.let_steps_finish()
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SystemExit):
            stop.end_at_once()
