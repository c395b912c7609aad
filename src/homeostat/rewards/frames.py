"""The wire format between parent and worker: length-prefixed frames over a socket pair.

The parent sends pickles that it made itself. A worker runs foreign code, so its answers are JSON
and are never unpickled: at worst they are refused.
"""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct(">Q")
MAX_FRAME_BYTES = 2**28


class FrameReader:
    """Collect bytes as they arrive and return whole frames."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def add(self, data: bytes) -> None:
        """Add bytes that arrived."""
        self.buffer += data

    def take(self) -> bytes | None:
        """Return the next frame, or None while it is incomplete."""
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
    """Send one frame."""
    channel.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_frame(channel: socket.socket, reader: FrameReader) -> bytes | None:
    """Wait for the next frame; None once the other side has closed the connection."""
    while (frame := reader.take()) is None:
        data = channel.recv(2**20)
        if not data:
            return None
        reader.add(data)
    return frame
