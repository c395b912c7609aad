"""Is the process that made a file still alive? It holds a lock on it, which dies with it.

Unlike a process id, a lock is never taken over by a stranger, and a killed process that nobody has
waited for yet holds none.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_TRIES = 200


def hold(path: Path) -> int:
    """Make the file and hold it. The descriptor must stay open; closing it lets go."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    for last in (*[False] * _TRIES, True):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            # Whoever asks whether it is held has a lock on it for a moment.
            if last:
                os.close(descriptor)
                raise
        time.sleep(0.001)
    raise AssertionError("the last try returns or raises")


def is_held(path: Path) -> bool:
    """False where there is no such file, or nobody holds it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
