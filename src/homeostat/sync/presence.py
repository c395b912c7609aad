"""Is the process that made a file still alive? It holds a lock on it, which dies with it.

Unlike a process id, a lock is never taken over by a stranger, and a killed process that nobody has
waited for yet holds none.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def hold(path: Path) -> int:
    """Make the file and hold it. The descriptor must stay open; closing it lets go."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


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
