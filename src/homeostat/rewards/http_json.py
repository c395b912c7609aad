"""One POST of JSON over http.client, with a time limit on the whole exchange.

The standard library's urllib follows redirects and would send the API key on to another host;
http.client does not. Proxies of the environment are not used. Stdlib only.
"""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, cast
from urllib.parse import urlsplit

# No answer of a judge is longer; a server that never stops must not fill the memory.
MAX_REPLY_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class Reply:
    """The status, the headers that matter and the body of a response."""

    status: int
    retry_after: str | None
    body: bytes


def post_json(
    url: str, message: Mapping[str, Any], *, headers: Mapping[str, str], timeout_s: float
) -> Reply:
    """Send a message and return the reply, whatever its status.

    Raises TimeoutError when the limit passes, ConnectionError when the exchange breaks.
    """
    deadline = time.monotonic() + timeout_s
    parts = urlsplit(url)
    assert parts.hostname is not None, "checked by the config"
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    try:
        connection.connect()
        body = json.dumps(message).encode()
        given = {"Content-Type": "application/json", "Connection": "close", **headers}
        connection.request("POST", parts.path, body, given)
        return _read(connection, deadline)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from error
    except (OSError, HTTPException) as error:
        # ssl's errors and a name that cannot be resolved are OSErrors, too.
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ConnectionError(what) from error
    finally:
        connection.close()


def _read(connection: HTTPConnection, deadline: float) -> Reply:
    timed = _TimedSocket(connection.sock, deadline)
    # It only asks for a file to read from.
    response = HTTPResponse(cast(socket.socket, timed), method="POST")
    response.begin()
    found = bytearray()
    while data := response.read1(2**16):
        found += data
        if len(found) > MAX_REPLY_BYTES:
            raise ConnectionError(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
    length = response.getheader("Content-Length")
    if length is not None and length.isdigit() and len(found) < int(length):
        raise ConnectionError(f"the reply broke off after {len(found)} of {length} bytes")
    return Reply(response.status, response.getheader("Retry-After"), bytes(found))


class _TimedSocket:
    """A socket whose reads all end by one deadline, those of the headers too.

    A limit per read would never end for a server that sends a byte now and then.
    """

    def __init__(self, inner: socket.socket, deadline: float) -> None:
        self._inner, self._deadline = inner, deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb", mode
        return io.BufferedReader(_TimedReads(self._inner, self._deadline))


class _TimedReads(io.RawIOBase):
    def __init__(self, inner: socket.socket, deadline: float) -> None:
        super().__init__()
        self._inner, self._deadline = inner, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._inner.settimeout(_left(self._deadline))
        return self._inner.recv_into(buffer)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is over")
    return left
