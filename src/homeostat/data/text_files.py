"""Read rows from files that can only be read from their beginning: compressed lines, and CSV.

    .jsonl.gz, .jsonl.zst   one JSON object per line
    .csv, .tsv, also packed the first line names the columns; every cell is text, an empty one null

Rows are asked for in ascending order, so a file is decompressed once to count its rows and once to
read them, and nothing of it is kept in memory or on disk. A row that lies before the last one that
was read starts the file again.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from array import array
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import pyarrow as pa

from homeostat.data.dataset_folder import packing_of, suffix_of
from homeostat.data.sources import BadRowError, as_data_error, check_head, parse_line
from homeostat.errors import DataError

_BUFFER_BYTES = 1 << 20
_CODECS = {".gz": "gzip", ".zst": "zstd"}


def open_bytes(path: str) -> BinaryIO:
    """Open a file, decompressed if its name says that it is compressed."""
    packing = packing_of(path)
    if packing is None:
        return open(path, "rb")
    if packing == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    stream = pa.CompressedInputStream(pa.OSFile(path), _CODECS[packing])
    return cast(BinaryIO, io.BufferedReader(cast(Any, stream), _BUFFER_BYTES))


class ForwardRows:
    """Rows that are read in ascending order. `_entries` yields (number, what `_parse` takes)."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.brackets = (f"{path}:", "")
        self._what = f"not a whole {suffix_of(path)} file"
        self.numbers = array("q")
        with as_data_error(path, self._what):
            for number, _ in self._entries():
                self.numbers.append(number)
        if not self.numbers:
            raise DataError(f"{path}: the file is empty.")
        self._next, self._left = 0, iter(())

    def __len__(self) -> int:
        return len(self.numbers)

    def number(self, index: int) -> int:
        return self.numbers[index]

    def row(self, index: int) -> dict[str, Any]:
        with as_data_error(self.path, self._what):
            if index < self._next or self._next == 0:
                self._next, self._left = 0, self._entries()
            for _, entry in self._left:
                self._next += 1
                if self._next == index + 1:
                    return self._parse(entry)
        raise DataError(f"{self.path}: the file became shorter while it was read.")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open file: a worker process opens it again."""
        return {**self.__dict__, "_next": 0, "_left": iter(())}

    def _entries(self) -> Iterator[tuple[int, Any]]:
        raise NotImplementedError

    def _parse(self, entry: Any) -> dict[str, Any]:
        raise NotImplementedError


class PackedLines(ForwardRows):
    """One JSON object per line of a compressed file. Blank lines are skipped."""

    def _entries(self) -> Iterator[tuple[int, bytes]]:
        with open_bytes(self.path) as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = check_head(line, self.path)
                if line and not line.isspace():
                    yield number, line

    def _parse(self, entry: bytes) -> dict[str, Any]:
        return parse_line(entry)


class CsvRows(ForwardRows):
    """A table in text form, whose first line names the columns."""

    def __init__(self, path: str) -> None:
        self.columns: list[str] = []
        self._delimiter = "\t" if suffix_of(path) == ".tsv" else ","
        super().__init__(path)

    def _entries(self) -> Iterator[tuple[int, list[str]]]:
        # The limit exists once per process: the module's own, 131,072 characters, is too short for
        # long texts.
        csv.field_size_limit(sys.maxsize)
        with (
            open_bytes(self.path) as file,
            io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text,
        ):
            reader = csv.reader(text, delimiter=self._delimiter, strict=True)
            self.columns = self._header(next(reader, []))
            for cells in reader:
                if cells:
                    yield reader.line_num, cells

    def _header(self, names: list[str]) -> list[str]:
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise DataError(f"{self.path}:1: two columns are named {min(twice)!r}.")
        return names

    def _parse(self, entry: list[str]) -> dict[str, Any]:
        if len(entry) != len(self.columns):
            what = f"{len(entry)} cells, and the first line names {len(self.columns)} columns"
            raise BadRowError("wrong number of cells", what)
        return {name: cell or None for name, cell in zip(self.columns, entry, strict=True)}
