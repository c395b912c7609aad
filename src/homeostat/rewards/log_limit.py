"""Limit the size of rewards.log, to which users' code may print without end.

A file that has grown past MAX_BYTES keeps its beginning, which shows how a problem began, and its
end; a line between them says that the middle is missing. Writers hold the file open for appending,
so it is cut in place: what they write next goes after the new end. Stdlib only, because guardians
import it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

MAX_BYTES = 64 * 2**20
HEAD_BYTES = 8 * 2**20
TAIL_BYTES = 8 * 2**20
CHUNK_BYTES = 2**20
NOTE = b"\n[... left out here: rewards.log keeps its beginning and its newest lines ...]\n"


def trim(
    file: Path, *, limit: int = MAX_BYTES, head: int = HEAD_BYTES, tail: int = TAIL_BYTES
) -> bool:
    """Cut the middle out of a file that is too large. Return whether that was done.

    A file that cannot be opened or is being cut by another process is left alone.
    """
    with contextlib.suppress(OSError), file.open("r+b") as log:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(log.fileno()).st_size
        if size <= limit:
            return False
        newest = os.pread(log.fileno(), tail // 2, size - tail)
        # Start at the beginning of a line, unless a long line fills half of the tail.
        _close_up(log.fileno(), head, size - tail + newest.find(b"\n") + 1, limit)
        return True
    return False


def _close_up(log: int, head: int, source: int, limit: int) -> None:
    """Move what follows `source` to behind the head and a note, and cut the file there.

    It is cut only when nothing is left to move: a line that a worker writes meanwhile is kept.
    Workers that write faster than this moves cannot keep it busy past `limit`.
    """
    place = head + os.pwrite(log, NOTE, head)
    while place < limit and (part := os.pread(log, CHUNK_BYTES, source)):
        written = os.pwrite(log, part, place)
        source, place = source + written, place + written
    os.ftruncate(log, place)


def was_trimmed(file: Path, *, head: int = HEAD_BYTES) -> bool:
    """Return whether the middle of a file was cut out."""
    with contextlib.suppress(OSError), file.open("rb") as log:
        return os.pread(log.fileno(), len(NOTE), head) == NOTE
    return False
