"""Where compiled code is kept: a folder of the user's own, which nobody else may write to."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def compile_root() -> Path:
    """The folder of the user's cache for compiled code. Raises OSError where there is no home."""
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
    """Nobody else may write where we load code from."""
    compiled, ours = place.parent, place.parent.parent
    ours.parent.mkdir(parents=True, exist_ok=True)
    for folder in (ours, compiled, place):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user (id {status.st_uid})")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{folder} can be written by others")
