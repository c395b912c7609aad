"""Channels: whole messages, in order, between the controller and one process of a worker.

    Channel    sends and receives messages; tells when the other end is gone
    Listener   where the processes of a group check in: an address that `dial` reaches, and a key
               that a caller must know

Everything above this file speaks of these two alone, so that workers on another host are another
Channel and Listener. Here is the one for this host: an AF_UNIX socket in a folder that only this
user can enter, with a random key that both ends prove to know. Framing and the proof are
multiprocessing's own.

A message is bytes; what it means is packed by wire.py. One thread may send while another receives.
Standard library only: a worker imports this before its factory.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Protocol

# How long a caller may take to prove that it knows the key.
PROOF_SECONDS = 5.0


class ChannelClosedError(ConnectionError):
    """The other end is gone, or this one was closed."""


class Channel(Protocol):
    """One end of a connection to a process."""

    def send(self, message: bytes) -> None:
        """Hand over a whole message. Raises ChannelClosedError."""
        ...

    def receive(self, *, timeout_s: float | None = None) -> bytes:
        """Wait for the next whole message, for ever where no time is given.

        Raises TimeoutError where nothing came in that time, and ChannelClosedError once all that
        the other end had sent was received.
        """
        ...

    def close(self) -> None:
        """Let go of this end: the other one learns of it. Idempotent."""
        ...


class Listener(Protocol):
    """The point at which processes check in while a group starts."""

    address: str
    key: bytes

    def accept(self, *, timeout_s: float) -> Channel | None:
        """Return the channel of the next caller that knows the key; None where there was none."""
        ...

    def close(self) -> None:
        """Accept nobody any more; channels that were accepted stay open."""
        ...


def dial(address: str, key: bytes) -> Channel:
    """Reach a listener by its address. Raises OSError, or AuthenticationError for a wrong key."""
    return SocketChannel(Client(address, "AF_UNIX", authkey=key))


class SocketChannel:
    """A Channel over a stream socket."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self, *, timeout_s: float | None = None) -> bytes:
        if timeout_s is not None:
            _limit_reads(self._connection, timeout_s)
        try:
            return self._connection.recv_bytes()
        except BlockingIOError as error:
            raise TimeoutError(f"no message within {timeout_s:.4g} s") from error
        except (EOFError, OSError) as error:
            raise ChannelClosedError(str(error)) from error
        finally:
            if timeout_s is not None and not self._connection.closed:
                _limit_reads(self._connection, None)

    def close(self) -> None:
        self._connection.close()


class SocketListener:
    """A Listener for processes of this host. Raises OSError where the folder takes no socket."""

    def __init__(self, folder: Path, *, backlog: int) -> None:
        self.address = str(folder / "socket")
        self.key = secrets.token_bytes(32)
        self._server = socket.socket(socket.AF_UNIX)
        try:
            self._server.bind(self.address)
        except OSError:
            self._server.close()
            raise
        self._server.listen(backlog)

    def accept(self, *, timeout_s: float) -> Channel | None:
        self._server.settimeout(timeout_s)
        try:
            caller, _ = self._server.accept()
        except TimeoutError:
            return None
        connection = Connection(caller.detach())
        try:
            _limit_reads(connection, PROOF_SECONDS)
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            _limit_reads(connection, None)
        except (AuthenticationError, EOFError, OSError):
            # It died while it spoke, which is noticed elsewhere, or is none of ours.
            connection.close()
            return None
        return SocketChannel(connection)

    def close(self) -> None:
        self._server.close()


def _limit_reads(connection: Connection, seconds: float | None) -> None:
    """Have reads fail with BlockingIOError after so long; None is for ever. Sends are as before."""
    # To the system 0 is for ever.
    micros = 0 if seconds is None else max(1, round(seconds * 1e6))
    limit = struct.pack("ll", *divmod(micros, 1_000_000))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
