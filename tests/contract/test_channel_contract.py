"""The contract of every Channel, and of the Listener where processes check in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError, Pipe
from pathlib import Path

import numpy as np
import pytest

from homeostat.config.ranks import LOOPBACK
from homeostat.workers.channel import (
    Channel,
    ChannelClosedError,
    SocketChannel,
    SocketListener,
    TcpListener,
    dial,
)

# Under load everything may be late; what is asserted of time is only that nothing waits for ever.
SOON_S = 20.0
Ends = tuple[Channel, Channel]


def dialled(folder: Path) -> Ends:
    """Two ends that met at a listener, as a controller and a worker do."""
    return dialled_at(SocketListener(folder, backlog=1))


def dialled_at(listener: SocketListener) -> Ends:
    with ThreadPoolExecutor(1) as thread:
        calling = thread.submit(dial, listener.address, listener.key)
        accepted = listener.accept(timeout_s=SOON_S)
        caller = calling.result(SOON_S)
    # What was accepted outlives the listener.
    listener.close()
    assert accepted is not None
    return accepted, caller


def paired(folder: Path) -> Ends:
    """A socket pair, without an address."""
    one, other = Pipe()
    return SocketChannel(one), SocketChannel(other)


def dialled_by_tcp(folder: Path) -> Ends:
    """A call over the network, to an address of this machine."""
    return dialled_at(TcpListener(LOOPBACK, backlog=1))


CHANNELS: dict[str, Callable[[Path], Ends]] = {
    "dialled": dialled,
    "dialled_by_tcp": dialled_by_tcp,
    "paired": paired,
}


@pytest.fixture(params=CHANNELS)
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ends]:
    one, other = CHANNELS[request.param](tmp_path)
    yield one, other
    one.close()
    other.close()


def test_messages_arrive_whole_and_in_order_both_ways(ends: Ends) -> None:
    rng = np.random.default_rng()
    for sender, receiver in (ends, ends[::-1]):
        sent = [rng.bytes(size) for size in (0, 1, 7, 1000, 0, 30_000)]
        for message in sent:
            sender.send(message)
        assert [receiver.receive(timeout_s=SOON_S) for _ in sent] == sent


def test_one_thread_sends_while_another_receives(ends: Ends) -> None:
    """Far more than the system takes at one time, in both directions."""
    large = np.random.default_rng().bytes(8_000_000)
    with ThreadPoolExecutor(2) as threads:
        sending = [threads.submit(end.send, large) for end in ends]
        assert all(end.receive(timeout_s=SOON_S) == large for end in ends)
        for sent in sending:
            sent.result(SOON_S)


@pytest.mark.parametrize("timeout_s", [0.0, 0.05])
def test_a_wait_has_a_deadline_after_which_the_channel_still_works(
    ends: Ends, timeout_s: float
) -> None:
    one, other = ends
    with pytest.raises(TimeoutError, match="no message within"):
        one.receive(timeout_s=timeout_s)
    timer = threading.Timer(0.2, other.send, [b"late"])
    timer.start()
    # Without a time it waits, whatever the wait before was limited to.
    assert one.receive() == b"late"
    timer.join()


def test_what_was_sent_is_received_before_the_end_is_told(ends: Ends) -> None:
    one, other = ends
    other.send(b"last words")
    other.close()
    other.close()
    assert one.receive(timeout_s=SOON_S) == b"last words"
    with pytest.raises(ChannelClosedError):
        one.receive(timeout_s=SOON_S)
    with pytest.raises(ChannelClosedError):
        one.receive()
    with pytest.raises(ChannelClosedError):
        one.send(b"to nobody")
    for use in (other.receive, lambda: other.send(b"from nobody")):
        with pytest.raises(ChannelClosedError):
            use()


def test_a_receiver_that_waits_learns_of_the_end_at_once(ends: Ends) -> None:
    one, other = ends
    timer = threading.Timer(0.1, other.close)
    timer.start()
    with pytest.raises(ChannelClosedError):
        one.receive()
    timer.join()


# Listeners


def test_only_who_knows_the_key_is_accepted(tmp_path: Path) -> None:
    listener = SocketListener(tmp_path, backlog=2)
    with ThreadPoolExecutor(1) as thread:
        stranger = thread.submit(dial, listener.address, b"guessed")
        assert listener.accept(timeout_s=SOON_S) is None
        with pytest.raises(AuthenticationError):
            stranger.result(SOON_S)
        # A stranger does not stop those who come after it.
        ours = thread.submit(dial, listener.address, listener.key)
        accepted = listener.accept(timeout_s=SOON_S)
        ours.result(SOON_S).send(b"hello")
    assert accepted is not None
    assert accepted.receive(timeout_s=SOON_S) == b"hello"
    listener.close()


def test_keys_differ_and_waiting_for_nobody_has_a_deadline(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    one, other = (SocketListener(folder, backlog=1) for folder in folders)
    assert one.key != other.key
    begun = time.monotonic()
    assert one.accept(timeout_s=0.05) is None
    assert time.monotonic() - begun < SOON_S
    one.close()
    other.close()
    with pytest.raises(OSError, match=r"refused|No such"):
        dial(one.address, one.key)
