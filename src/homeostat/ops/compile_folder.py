"""Where compiled code is kept: a folder of the user's own, which nobody else may write to."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def compile_root() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    base = Path(given) if given and os.path.isabs(given) else Path.home() / ".cache"
    return base / "homeostat" / "compile"


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
