"""How parent and worker speak: frames of bytes, each after its length, over a socket pair.

The parent sends pickles that it made itself. A worker runs foreign code, so what comes back is JSON
and never unpickled: at worst it is refused.
"""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct(">Q")
MAX_FRAME_BYTES = 2**28


class FrameReader:
    """Bytes go in as they arrive, whole frames come out."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def add(self, data: bytes) -> None:
        self.buffer += data

    def take(self) -> bytes | None:
        """The next frame, or None as long as it is not whole."""
        if len(self.buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self.buffer)
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {length} bytes; {MAX_FRAME_BYTES} are allowed")
        end = _LENGTH.size + length
        if len(self.buffer) < end:
            return None
        frame = bytes(self.buffer[_LENGTH.size : end])
        del self.buffer[:end]
        return frame


def send_frame(channel: socket.socket, payload: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_frame(channel: socket.socket, reader: FrameReader) -> bytes | None:
    """The next frame, waiting for it; None once the other side has gone."""
    while (frame := reader.take()) is None:
        data = channel.recv(2**20)
        if not data:
            return None
        reader.add(data)
    return frame
