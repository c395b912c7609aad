"""Files that are whole whatever happens, and the system calls that make them so."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_atomically(
    path: Path, content: str | bytes, *, sync: bool = True, mode: int = 0o666
) -> None:
    """The file holds what it held or `content`, never a part, also after a power cut (`sync`).

    `mode`: its permissions, before the umask.
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
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Names are part of a folder: a rename is safe from a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
