"""Write files atomically and durably."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_atomically(
    path: Path, content: str | bytes, *, sync: bool = True, mode: int = 0o666
) -> None:
    """Write a file so that it holds either its old content or `content`, never a part.

    With `sync` this also holds after a power cut. `mode` is the file's permissions, before the
    umask.
    """
    partial = path.with_name(f".{path.name}.partial")
    if isinstance(content, str):
        content = content.encode("utf-8", errors="backslashreplace")
    try:
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def sync_file(file: Path) -> None:
    """Flush a file to disk."""
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk: a rename survives a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(file: Path) -> str:
    """Return the SHA-256 checksum of a file."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
