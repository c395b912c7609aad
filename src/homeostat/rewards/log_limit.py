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
        newest = os.pread(log.fileno(), tail, size - tail)
        # Start at the beginning of a line, unless one line fills everything.
        newest = newest[newest.find(b"\n", 0, tail // 2) + 1 :]
        log.truncate(head)
        log.seek(head)
        log.write(NOTE + newest)
        return True
    return False


def was_trimmed(file: Path, *, head: int = HEAD_BYTES) -> bool:
    """Return whether the middle of a file was cut out."""
    with contextlib.suppress(OSError), file.open("rb") as log:
        return os.pread(log.fileno(), len(NOTE), head) == NOTE
    return False
