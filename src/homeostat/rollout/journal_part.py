"""Reads and writes one file of the journal: frames, appended one after the other.

    magic (8 bytes) | length of the head (4) | crc32 of the head (4) | head: JSON | body: bytes

The head says how long the body is and holds its SHA-256. A process never appends to the file of
another one, so that a frame cut short by a kill is the last in its file. A frame whose head is
damaged is skipped: reading continues at the next magic. A damaged body is found when it is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homeostat.observe.durable import sync_folder

MAGIC = b"\x89HSGRP\r\n"
_FRAME = struct.Struct("<8sII")
_SCAN_BYTES = 2**16
# A head holds names and settings but no tokens, so a longer one is damaged.
_MAX_HEAD_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that was found in a file."""

    path: Path
    head: Mapping[str, Any]
    body_at: int

    def body(self) -> bytes:
        """Read the body. Raises OSError, or ValueError if it is not what was written."""
        length = self.head["bytes"]
        with open(self.path, "rb") as file:
            body = os.pread(file.fileno(), length, self.body_at)
        if len(body) != length or hashlib.sha256(body).hexdigest() != self.head["sha256"]:
            raise ValueError("its checksum is wrong")
        return body


class PartWriter:
    """A new file that frames are appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        # The file's name survives a power cut from here on; its content does from `sync` on.
        sync_folder(path.parent)
        self._length = 0

    def append(self, head: Mapping[str, Any], body: bytes = b"") -> Frame:
        """Add a frame. If that fails, no part of it stays in the file. Raises OSError."""
        whole = {**head, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
        text = json.dumps(whole).encode("ascii")
        start, data = self._length, _FRAME.pack(MAGIC, len(text), zlib.crc32(text)) + text + body
        try:
            self._write(data)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, start)
            raise
        self._length = start + len(data)
        return Frame(self.path, whole, self._length - len(body))

    def sync(self) -> None:
        """Sync appended frames to disk, so that they survive a power cut."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


def frames(path: Path) -> Iterator[Frame]:
    """Yield the frames of a file whose heads are whole, in order. Raises OSError."""
    with open(path, "rb") as file:
        descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
        at = 0
        while at + _FRAME.size <= size:
            head_at = at + _FRAME.size
            head = _head(descriptor, at)
            if head is None:
                at = _next_magic(descriptor, at + 1, size)
                continue
            length, found = head
            body_at = head_at + length
            if body_at + found["bytes"] > size:
                # A kill cut the frame off, or both its length and its checksum are damaged.
                at = _next_magic(descriptor, at + 1, size)
                continue
            yield Frame(path, found, body_at)
            at = body_at + found["bytes"]


def _head(descriptor: int, at: int) -> tuple[int, dict[str, Any]] | None:
    """Return length and content of the head at a place, or None if it is not whole."""
    start = os.pread(descriptor, _SCAN_BYTES, at)
    if len(start) < _FRAME.size:
        return None
    magic, length, checksum = _FRAME.unpack_from(start)
    if magic != MAGIC or length > _MAX_HEAD_BYTES:
        return None
    text = start[_FRAME.size : _FRAME.size + length]
    if len(text) < length:
        text = os.pread(descriptor, length, at + _FRAME.size)
    if len(text) < length or zlib.crc32(text) != checksum:
        return None
    return length, dict(json.loads(text))


def _next_magic(descriptor: int, at: int, size: int) -> int:
    """Return where the next frame may begin, or the end of the file."""
    while at < size:
        found = os.pread(descriptor, _SCAN_BYTES, at).find(MAGIC)
        if found >= 0:
            return at + found
        at += _SCAN_BYTES - len(MAGIC) + 1
    return size
