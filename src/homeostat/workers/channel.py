"""Channels: whole messages, in order, between the controller and one process of a worker.

    Channel    sends and receives messages; tells when the other end is gone
    Listener   where the processes of a group check in: an address that `dial` reaches, and a key
               that a caller must know

Other files use only these two classes. Processes of this host use an AF_UNIX socket in a folder
that only this user can enter; those of other hosts use TCP, without encryption, as
torch.distributed and Ray do. Both ends prove that they know a random key. Framing and this proof
are those of multiprocessing.

A message is bytes; wire.py defines their meaning. One thread may send while another receives.
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

# Time limit for a caller to prove that it knows the key.
PROOF_SECONDS = 5.0
# Time limit for a listener on another host to accept a connection.
DIAL_SECONDS = 30.0
# Addresses that begin so are of a TcpListener.
TCP = "tcp://"
# A host that is gone sends nothing. These keep-alive settings (seconds and numbers of tries) detect
# it within a minute.
KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}


class ChannelClosedError(ConnectionError):
    """The other end is gone, or this one was closed."""


class Channel(Protocol):
    """One end of a connection to a process."""

    def send(self, message: bytes) -> None:
        """Send a whole message. Raises ChannelClosedError."""
        ...

    def receive(self, *, timeout_s: float | None = None) -> bytes:
        """Wait for the next whole message; without a time limit, wait for ever.

        Raises TimeoutError if no message arrives in time, and ChannelClosedError when the other end
        is closed and all its messages were received.
        """
        ...

    def close(self) -> None:
        """Close this end, which the other end notices. Idempotent."""
        ...


class Listener(Protocol):
    """The point at which processes check in while a group starts."""

    address: str
    key: bytes

    def accept(self, *, timeout_s: float) -> Channel | None:
        """Return the channel of the next caller that knows the key; None if there was none."""
        ...

    def close(self) -> None:
        """Accept no more connections. Channels that were accepted stay open."""
        ...


def dial(address: str, key: bytes) -> Channel:
    """Connect to a listener. Raises OSError, or AuthenticationError for a wrong key."""
    if not address.startswith(TCP):
        return SocketChannel(Client(address, "AF_UNIX", authkey=key))
    host, _, port = address.removeprefix(TCP).rpartition(":")
    caller = socket.create_connection((host, int(port)), timeout=DIAL_SECONDS)
    caller.settimeout(None)
    _keep_alive(caller)
    connection = Connection(caller.detach())
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    return SocketChannel(connection)


class SocketChannel:
    """A Channel over a stream socket."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._has_ended = False

    def send(self, message: bytes) -> None:
        # TCP accepts a first message even if the other end is gone.
        if self._has_ended:
            raise ChannelClosedError("the other end is gone")
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
            self._has_ended = True
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
        self._server = _listening(socket.AF_UNIX, self.address, backlog=backlog)

    def accept(self, *, timeout_s: float) -> Channel | None:
        self._server.settimeout(timeout_s)
        try:
            caller, _ = self._server.accept()
        except TimeoutError:
            return None
        if caller.family != socket.AF_UNIX:
            _keep_alive(caller)
        connection = Connection(caller.detach())
        try:
            _limit_reads(connection, PROOF_SECONDS)
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            _limit_reads(connection, None)
        except (AuthenticationError, EOFError, OSError):
            # It died while it checked in, which is noticed elsewhere, or it is not one of our
            # processes.
            connection.close()
            return None
        return SocketChannel(connection)

    def close(self) -> None:
        self._server.close()


class TcpListener(SocketListener):
    """A Listener for processes of other hosts, at an address of this one that they reach."""

    def __init__(self, host: str, *, backlog: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = _listening(family, (host, 0), backlog=backlog)
        self.address = f"{TCP}{host}:{self._server.getsockname()[1]}"
        self.key = secrets.token_bytes(32)


def _listening(family: int, address: str | tuple[str, int], *, backlog: int) -> socket.socket:
    server = socket.socket(family)
    try:
        server.bind(address)
    except OSError:
        server.close()
        raise
    server.listen(backlog)
    return server


def _keep_alive(connection: socket.socket) -> None:
    """Detect a host that disappears without closing its connections, and send small messages at
    once.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        # Linux has them all; elsewhere the system's own times hold.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _limit_reads(connection: Connection, seconds: float | None) -> None:
    """Make reads fail with BlockingIOError after this time; None: never. Sends do not change."""
    # The system takes 0 as no limit.
    micros = 0 if seconds is None else max(1, round(seconds * 1e6))
    limit = struct.pack("ll", *divmod(micros, 1_000_000))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
