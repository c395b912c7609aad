"""Read compressed logs as text, and recognise files that are not text.

gzip, bzip2 and xz are recognised by their first bytes, not by file names, and unpacked while they
are read. If a file is incomplete, for example because its writer was killed, its first part is
read. Archives and other formats without lines are refused, because as text they would be judged as
a log without errors.
"""

from __future__ import annotations

import io
from typing import Any, BinaryIO

PACKED_SUFFIXES = (".gz", ".bz2", ".xz")
_UNPACKED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\x00": "lzma"}
# First bytes -> what the file is, and what to do with it.
_OTHERS = {
    b"PK\x03\x04": "a zip archive or a checkpoint of torch. Unpack the archive and give its folder",
    b"\x28\xb5\x2f\xfd": "compressed with zstd. Unpack it with `zstd -d` and give the result",
    b"7z\xbc\xaf": "a 7z archive. Unpack it and give its folder",
    b"PAR1": "a Parquet table, which holds rows and not the log of a run",
    b"GGUF": "a model in GGUF format",
    b"SQLite format 3": "an SQLite database. Export its metrics as CSV or JSON lines",
    b"\x89PNG": "a picture. Give the text of the log instead",
    b"\xff\xd8\xff": "a picture. Give the text of the log instead",
    b"%PDF": "a PDF. Give the text of the log instead",
}
_TAR = slice(257, 262)
# Control characters that do not occur in text. Logs with progress bars have \b, \r and escapes, and
# a rotated log may begin with zeros.
_CONTROLS = bytes(set(range(1, 32)) - set(b"\a\b\t\n\v\f\r\x1a\x1b"))
# In random bytes, 9 % are such characters.
_MAX_CONTROLS = 0.02
_MIN_CONTROLS = 8


def plain_name(name: str) -> str:
    """Return a file's name without the suffix of a compression."""
    ends = (suffix for suffix in PACKED_SUFFIXES if name.endswith(suffix))
    return name.removesuffix(next(ends, ""))


def is_packed(head: bytes) -> bool:
    """Return whether these first bytes are those of a compressed file."""
    return head.startswith(tuple(_UNPACKED))


def why_no_text(head: bytes) -> str:
    """Return what a file is if its first bytes are not text; "" if they may be text."""
    for start, what in _OTHERS.items():
        if head.startswith(start):
            return what
    if head[_TAR] == b"ustar":
        return "a tar archive. Unpack it and give its folder"
    num_controls = len(head) - len(head.translate(None, _CONTROLS))
    if num_controls > max(_MIN_CONTROLS, _MAX_CONTROLS * len(head)):
        return "binary, not text. Give a console log or a file of metrics"
    return ""


def unpacked(file: BinaryIO) -> BinaryIO:
    """Return the file, or its uncompressed content if it is compressed."""
    head = file.peek(8) if isinstance(file, io.BufferedReader) else b""
    for start, module in _UNPACKED.items():
        if head.startswith(start):
            return io.BufferedReader(Unpacking(file, module=module), 1 << 20)
    return file


class Unpacking(io.RawIOBase):
    """The content of a compressed file. `is_cut` becomes True if the file is incomplete."""

    def __init__(self, file: BinaryIO, *, module: str) -> None:
        super().__init__()
        self.is_cut = False
        self._content, self._errors = _content(file, module)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._content.read1(len(buffer))
        except self._errors:
            self.is_cut = True
            data = b""
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._content.close()
        super().close()


def _content(file: BinaryIO, module: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return a file with the uncompressed content, and the exceptions that damaged data raises."""
    # Each module takes milliseconds to import, and most logs need none.
    if module == "gzip":
        import gzip
        import zlib

        return gzip.GzipFile(fileobj=file), (EOFError, gzip.BadGzipFile, zlib.error)
    if module == "bz2":
        import bz2

        return bz2.BZ2File(file), (EOFError, OSError)
    import lzma

    return lzma.LZMAFile(file), (EOFError, lzma.LZMAError)
