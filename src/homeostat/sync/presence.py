"""Find out whether the process that created a file is still alive: it holds a lock on the file.

The lock ends with the process. Unlike a process id, it cannot pass to another process, and a killed
process that was not reaped yet (a zombie) holds none.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

_TRIES = 200


def hold(path: Path) -> int:
    """Make the file and hold it. The descriptor must stay open; closing it lets go."""
    for last in (*[False] * _TRIES, True):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # A process that checks whether the file is held has a lock on it for a moment.
            os.close(descriptor)
            if last:
                raise
        else:
            if _is_at(path, descriptor):
                return descriptor
            # Another process removed the file before this one took the lock.
            os.close(descriptor)
        time.sleep(0.001)
    raise FileNotFoundError(errno.ENOENT, "it is removed as soon as it is made", str(path))


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool:
    """Return whether a process holds the file. False if there is no such file."""
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


def remove_unheld(path: Path) -> None:
    """Remove the file unless somebody holds it, or it is another user's.

    It is removed under a lock: a process that wants to hold it meanwhile waits, and creates it
    again.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(path, descriptor):
            path.unlink(missing_ok=True)
    except (BlockingIOError, PermissionError):
        return
    finally:
        os.close(descriptor)
