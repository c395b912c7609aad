"""Read rows by number from JSON, Parquet and folders written by datasets' save_to_disk.

Invariant: whatever the bytes are, this module raises only DataError, which names the file and the
line or row. A defect of one row is a BadRowError (the caller may drop that row and continue); a
defect of the file is a plain DataError.

Nothing large is decoded as a whole: JSON lines are found by byte offset, Arrow batches are memory
mapped, and one row group of a Parquet file is open at a time. Only a JSON list has to be decoded as
a whole, so it may not be large.
"""

from __future__ import annotations

import bisect
import codecs
import csv
import itertools
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from homeostat.config.base import is_file_name
from homeostat.errors import DataError
from homeostat.json_text import parse_json

MAX_STATE_BYTES = 10_000_000
# Decoding takes several times as much memory, in each process that tokenises.
MAX_LIST_BYTES = 500_000_000

# Exceptions that json and pyarrow have been seen to raise on hostile bytes.
_DECODE_ERRORS = (
    pa.ArrowException,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    NotImplementedError,
    RecursionError,
    EOFError,
    zlib.error,
    csv.Error,
)


class BadRowError(DataError):
    """One row cannot be used. `reason` is the kind of defect, under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason

    def __str__(self) -> str:
        return readable(": ".join(self.args), max_chars=600)


def readable(text: str, *, max_chars: int) -> str:
    """Return text from a data file that is safe to print: one short line, no control characters."""
    cut = text if len(text) <= max_chars else text[: max_chars - 3] + "..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)


class RowSource(Protocol):
    """Rows of one file or folder, by index from 0.

    People find a row by its number between the two halves of `brackets`: `file:line`, or
    `file[row]` counted from 0.
    """

    brackets: tuple[str, str]

    def __len__(self) -> int: ...

    def number(self, index: int) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Return the row's columns. Raises BadRowError."""
        ...


@contextmanager
def as_data_error(path: str | Path, what: str) -> Iterator[None]:
    """Turn what decoding hostile bytes raises into a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except _DECODE_ERRORS as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"{path}: {what}: {readable(reason[0], max_chars=200)}") from None


class JsonLines:
    """One JSON object per line, found by byte offset. Blank lines are skipped."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.brackets = (f"{path}:", "")
        self.starts, self.sizes, self.lines = array("q"), array("q"), array("q")
        with as_data_error(path, "cannot be read"), open(path, "rb") as file:
            self._scan(file)
        if not self.starts:
            raise DataError(f"{path}: the file is empty.")

    def _scan(self, file: BinaryIO) -> None:
        start = 0
        for number, line in enumerate(file, start=1):
            if number == 1:
                start, line = len(line), check_head(line, self.path)
                start -= len(line)
            if line and not line.isspace():
                self.starts.append(start)
                self.sizes.append(len(line))
                self.lines.append(number)
            start += len(line)

    def __len__(self) -> int:
        return len(self.starts)

    def number(self, index: int) -> int:
        return self.lines[index]

    def row(self, index: int) -> dict[str, Any]:
        with as_data_error(self.path, "cannot be read"), open(self.path, "rb") as file:
            file.seek(self.starts[index])
            line = file.read(self.sizes[index])
        return parse_line(line)


def check_head(line: bytes, path: str) -> bytes:
    """Return a file's first line without its byte order mark. Raises DataError if it is no line."""
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{path}:1: this is UTF-16 text. Save the file as UTF-8.")
    line = line.removeprefix(codecs.BOM_UTF8)
    if line.lstrip().startswith(b"["):
        raise DataError(f"{path}:1: the file holds a JSON list. Name it .json.")
    return line


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line. Raises BadRowError."""
    try:
        value = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRowError("not UTF-8 text", f"byte {error.start} of the line") from None
    except ValueError as error:
        raise BadRowError("not JSON", str(error)) from None
    return _require_object(value)


class JsonList:
    """One list of JSON objects, decoded as a whole."""

    def __init__(self, path: str) -> None:
        self.brackets = (f"{path}[", "]")
        with as_data_error(path, "not a JSON list"):
            if Path(path).stat().st_size > MAX_LIST_BYTES:
                raise DataError(f"{path}: too large for a JSON list. Write one object per line.")
            self.values = parse_json(Path(path).read_bytes().decode("utf-8-sig"))
        if not self.values:
            raise DataError(f"{path}: the list is empty.")

    def __len__(self) -> int:
        return len(self.values)

    def number(self, index: int) -> int:
        return index

    def row(self, index: int) -> dict[str, Any]:
        return _require_object(self.values[index])


def holds_list(path: str) -> bool:
    with as_data_error(path, "cannot be read"), open(path, "rb") as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _require_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRowError("not a JSON object", f"this is a {type(value).__name__}")
    return value


class _Batches:
    """Code shared by Parquet and Arrow: rows in record batches, cells decoded on demand."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        self.path = path
        self.brackets = (f"{path}[", "]")
        self.columns = columns
        self.batch_ends: list[int] = []

    def __len__(self) -> int:
        return self.batch_ends[-1] if self.batch_ends else 0

    def number(self, index: int) -> int:
        return index

    def row(self, index: int) -> dict[str, Any]:
        number = bisect.bisect_right(self.batch_ends, index)
        first = self.batch_ends[number - 1] if number else 0
        with as_data_error(f"{self.path}[{index}]", "the file is damaged"):
            table = self._batch(number)
            cells = {name: table.column(name)[index - first].as_py() for name in self.columns}
            return {name: _without_nulls(cell) for name, cell in cells.items()}

    def _batch(self, number: int) -> pa.Table | pa.RecordBatch:
        raise NotImplementedError

    def _check_schema(self, schema: pa.Schema) -> None:
        if not len(self):
            raise DataError(f"{self.path}: the file is empty.")
        self.columns = schema.names if self.columns is None else list(self.columns)
        for name in self.columns:
            found = len(schema.get_all_field_indices(name))
            if found != 1:
                shown = readable(", ".join(schema.names[:20]), max_chars=300)
                times = "no column is" if not found else f"{found} columns are"
                raise DataError(f"{self.path}: {times} named {name!r}. Its columns: {shown}.")


class Parquet(_Batches):
    """A Parquet file; the row group used last stays decoded."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        super().__init__(path, columns)
        with as_data_error(path, "not a whole Parquet file"):
            self._file = pq.ParquetFile(path)
            meta = self._file.metadata
            sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
            self.batch_ends = list(itertools.accumulate(sizes))
            self._check_schema(self._file.schema_arrow)
        self._open: tuple[int, pa.Table] | None = None

    def _batch(self, number: int) -> pa.Table:
        if self._open is None or self._open[0] != number:
            table = self._file.read_row_group(number, columns=self.columns)
            # Invalid UTF-8 or offsets must be detected before any cell is read.
            table.validate(full=True)
            self._open = (number, table)
        return self._open[1]


class SavedDataset(_Batches):
    """A folder of Arrow stream files listed in state.json, memory mapped."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        super().__init__(path, columns)
        folder = Path(path)
        state = read_state(folder)
        self._indices: np.ndarray | None = None
        self._batches: list[pa.RecordBatch] = []
        schemas = []
        for file in listed_files(folder, state, "_data_files"):
            schema, batches = _read_stream(file)
            schemas.append(schema)
            self._batches += batches
        self._valid = [False] * len(self._batches)
        self.batch_ends = list(itertools.accumulate(len(batch) for batch in self._batches))
        with as_data_error(path, "the folder is damaged"):
            for schema in schemas:
                self._check_schema(schema)
        self._indices = _read_indices(folder, state, num_rows=len(self))

    def __len__(self) -> int:
        return super().__len__() if self._indices is None else len(self._indices)

    def row(self, index: int) -> dict[str, Any]:
        return super().row(index if self._indices is None else int(self._indices[index]))

    def _batch(self, number: int) -> pa.RecordBatch:
        if not self._valid[number]:
            batch = self._batches[number].select(self.columns)
            batch.validate(full=True)
            self._batches[number], self._valid[number] = batch, True
        return self._batches[number]


def read_state(folder: Path) -> dict[str, Any]:
    """Read the state.json of a folder written by save_to_disk."""
    state = _read_json(folder / "state.json")
    if not isinstance(state, dict):
        raise DataError(f"{folder / 'state.json'}: not a JSON object.")
    return state


def saved_splits(folder: Path) -> list[str]:
    """Return the splits of a folder that save_to_disk wrote for several of them."""
    file = folder / "dataset_dict.json"
    value = _read_json(file)
    splits = value.get("splits") if isinstance(value, dict) else None
    names = [name for name in splits if is_file_name(name)] if isinstance(splits, list) else []
    if not names:
        raise DataError(f"{file}: no list of splits.")
    return names


def _read_json(file: Path) -> Any:
    with as_data_error(file, "cannot be read"):
        if file.stat().st_size > MAX_STATE_BYTES:
            raise DataError(f"{file}: larger than any such file should be.")
        return parse_json(file.read_bytes())


def listed_files(folder: Path, state: dict[str, Any], key: str) -> list[Path]:
    entries = state.get(key)
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{folder / 'state.json'}: {key} is not a list of files.")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not all(is_file_name(name) for name in names):
        raise DataError(f"{folder / 'state.json'}: {key} holds what is no file name.")
    return [folder / str(name) for name in names]


def index_files(folder: Path, state: dict[str, Any]) -> list[Path]:
    """Return the files that select and order rows; only older versions of datasets write them."""
    key = "_indices_data_files"
    return listed_files(folder, state, key) if state.get(key) else []


def _read_indices(folder: Path, state: dict[str, Any], *, num_rows: int) -> np.ndarray | None:
    files = index_files(folder, state)
    if not files:
        return None
    parts = []
    for file in files:
        _, batches = _read_stream(file)
        with as_data_error(file, "not a list of row numbers"):
            columns = [batch.column("indices").cast(pa.int64()) for batch in batches]
            parts += [column.to_numpy(zero_copy_only=True) for column in columns]
    indices = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    if not len(indices) or indices.min() < 0 or indices.max() >= num_rows:
        raise DataError(f"{files[0]}: names rows that the data files ({num_rows} rows) lack.")
    return indices


def _read_stream(file: Path) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    if file.exists() and not file.is_file():
        raise DataError(f"{file}: not a plain file.")
    with as_data_error(file, "not a whole Arrow stream file"):
        reader = pa.ipc.open_stream(pa.memory_map(str(file)))
        return reader.schema, [batch for batch in reader if len(batch)]


def _without_nulls(value: Any) -> Any:
    """Drop the None fields that Arrow adds to structs whose rows did not have them."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
