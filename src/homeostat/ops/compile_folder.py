"""The cache folder for compiled code, to which only the user may write."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def compile_root() -> Path:
    """Return the user's cache folder for compiled code. Raises OSError if there is no home."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given and os.path.isabs(given):
        return Path(given) / "homeostat" / "compile"
    try:
        return Path.home() / ".cache" / "homeostat" / "compile"
    except RuntimeError:
        raise FileNotFoundError(
            errno.ENOENT, "no home folder is known (HOME and XDG_CACHE_HOME are not set)"
        ) from None


def require_private(place: Path) -> None:
    """Refuse a folder to which others may write, because code is loaded from it."""
    compiled, ours = place.parent, place.parent.parent
    ours.parent.mkdir(parents=True, exist_ok=True)
    for folder in (ours, compiled, place):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user (id {status.st_uid})")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{folder} can be written by others")
