"""Write files atomically and durably."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from pathlib import Path

OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_RUST_OS_ERROR = re.compile(r"\(os error (\d{1,4})\)")


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


def not_written(what: Path | str, error: OSError) -> str:
    """Return the sentences for a file or folder that could not be written."""
    full = error.errno in OUT_OF_SPACE
    way_out = " Free some space, or choose a place on another disk." if full else ""
    return f"{what}: cannot write it: {error.strerror or error}.{way_out}"


class FileErrorsAsOsError:
    """Turn the errors inside the block that say "(os error 28)" into OSError with that number.

    safetensors and tokenizers are written in Rust. Where a file cannot be written,
    safetensors raises its own class, and tokenizers the bare class Exception, which no narrow
    except clause can name.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        found = _RUST_OS_ERROR.search(str(error)) if isinstance(error, Exception) else None
        if found is not None and not isinstance(error, OSError):
            number = int(found[1])
            raise OSError(number, os.strerror(number)) from error


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
