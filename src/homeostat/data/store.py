"""Tokenised rows on disk: flat memory-mapped files that many processes may read at once.

    tokens.bin   int32 [N]       all rows concatenated
    weights.bin  float32 [N]     weight of predicting each token
    offsets.bin  int64 [B + 1]   row b is tokens[offsets[b]:offsets[b + 1]]
    origins.bin  int64 [B, 2]    source, and the line or row number in it
    labels.bin   float32 [B]     label of the completion; NaN in rows that have none
    meta.json    the report, the sources, and a checksum of each file

Invariant: a folder with its final name is complete. It is written under another name, flushed to
disk and renamed; a reader that finds a wrong checksum has it rebuilt.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from homeostat.arrays import IntArray
from homeostat.json_text import parse_json
from homeostat.observe.durable import sha256_of, sync_folder
from homeostat.types import TokenRow

FORMAT_VERSION = 3
# A builder writes all the time, so a hidden folder without writes for this long was abandoned.
ABANDONED_AFTER_S = 3600.0
_DTYPES = {
    "tokens": np.int32,
    "weights": np.float32,
    "offsets": np.int64,
    "origins": np.int64,
    "labels": np.float32,
}


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be used: its place, the kind of defect, the whole message."""

    place: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """The numbers of rows that were kept, dropped or truncated, and the reasons."""

    seen: int
    kept: int
    dropped_overlong: int
    truncated: int
    bad: dict[str, int]
    examples: tuple[BadRow, ...]
    overlong_examples: tuple[BadRow, ...]
    tokens: int
    trained_tokens: int

    @property
    def num_bad(self) -> int:
        return sum(self.bad.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PrepareReport:
        examples = tuple(BadRow(**item) for item in value["examples"])
        overlong = tuple(BadRow(**item) for item in value["overlong_examples"])
        return cls(**{**value, "examples": examples, "overlong_examples": overlong})


class RowStore:
    """Rows by number, read from disk on demand."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        maps = {name: _map(folder, name) for name in _DTYPES}
        self._tokens_N, self._weights_N = maps["tokens"], maps["weights"]
        self._offsets_B = np.array(maps["offsets"])
        self._origins_B2 = maps["origins"].reshape(-1, 2)
        self.labels_B = np.array(maps["labels"])
        self._columns: Mapping[str, np.ndarray] = {}
        self._brackets: list[tuple[str, str]] = [tuple(pair) for pair in meta["brackets"]]
        self.report = PrepareReport.from_json(meta["report"])
        self.lengths: IntArray = np.diff(self._offsets_B)
        is_new_B = np.diff(self._origins_B2, axis=0).any(axis=1)
        # Numbers of the source rows: equal for rows that were made from the same one.
        self.made_from_B: IntArray = np.concatenate([[0], np.cumsum(is_new_B)]).astype(np.int64)
        # Digest of the content, not the files: a copy of the data on another disk is the same data.
        is_labelled = not np.isnan(self.labels_B).all()
        self.fingerprint: str = _content_digest(meta["sha256"], is_labelled=is_labelled)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row_id: int) -> TokenRow:
        if not 0 <= row_id < len(self):
            raise IndexError(f"row {row_id} of {len(self)}")
        span = self.span(row_id)
        tokens_T = self._tokens_N[span].astype(np.int64)
        columns = {name: np.array(values_N[span]) for name, values_N in self._columns.items()}
        label = self.labels_B[row_id]
        if not np.isnan(label):
            columns["label"] = np.full(len(tokens_T), label, dtype=np.float32)
        return TokenRow(int(row_id), tokens_T, np.array(self._weights_N[span]), columns)

    def span(self, row_id: int) -> slice:
        """Return the place of a row's tokens among all tokens of the store."""
        return slice(int(self._offsets_B[row_id]), int(self._offsets_B[row_id + 1]))

    @property
    def num_tokens(self) -> int:
        return int(self._offsets_B[-1])

    def with_columns(self, columns: Mapping[str, np.ndarray]) -> RowStore:
        """Return the same rows with further columns, each given for all tokens [N] of the store."""
        other = copy.copy(self)
        other._columns = {**self._columns, **columns}
        return other

    @property
    def max_token_id(self) -> int:
        """Return the largest id in the store; the model's vocabulary must contain it."""
        return int(self._tokens_N.max())

    @cached_property
    def source_B(self) -> IntArray:
        """Return the number of the source that each row comes from."""
        return np.array(self._origins_B2[:, 0])

    def origin(self, row_id: int) -> str:
        """Return the place of a row: `file:line`, or `file[row]` counted from 0."""
        source, number = (int(part) for part in self._origins_B2[row_id])
        before, after = self._brackets[source]
        return f"{before}{number}{after}"


def open_store(folder: Path) -> RowStore | None:
    """Return the store in a folder, or None if it is missing or incomplete."""
    try:
        meta = parse_json((folder / "meta.json").read_bytes())
        if meta["version"] != FORMAT_VERSION:
            return None
        for name in _DTYPES:
            # A wrong byte would train on wrong tokens without any other sign.
            if sha256_of(folder / f"{name}.bin") != meta["sha256"][name]:
                return None
        return RowStore(folder, meta)
    except (OSError, ValueError, LookupError, TypeError):
        return None


@dataclass(slots=True)
class _Column:
    """A file being written, and the checksum of its content."""

    file: BinaryIO
    digest: Any = field(default_factory=hashlib.sha256)

    def write(self, values: np.ndarray, dtype: type) -> None:
        data = np.ascontiguousarray(values, dtype=dtype).tobytes()
        self.file.write(data)
        self.digest.update(data)


class StoreWriter:
    """Collect rows under a hidden name; `commit` turns them into a store, leaving does not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        self.hidden = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:12]}"
        self.hidden.mkdir()
        self.columns = {name: self._open(name) for name in _DTYPES}
        self.num_tokens = 0
        self._write("offsets", np.zeros(1))

    def _open(self, name: str) -> _Column:
        return _Column(open(self.hidden / f"{name}.bin", "wb"))

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            # Closing writes what is buffered, which fails again on a full disk.
            with contextlib.ExitStack() as files:
                for column in self.columns.values():
                    files.callback(column.file.close)
        finally:
            # After a commit the hidden folder no longer exists, so this only cleans up failures.
            shutil.rmtree(self.hidden, ignore_errors=True)

    def _write(self, name: str, values: np.ndarray) -> None:
        self.columns[name].write(values, _DTYPES[name])

    def add(
        self,
        tokens_N: np.ndarray,
        weights_N: np.ndarray,
        *,
        lengths_B: np.ndarray,
        origins_B2: np.ndarray,
        labels_B: np.ndarray,
    ) -> None:
        """Append rows, concatenated."""
        self._write("tokens", tokens_N)
        self._write("weights", weights_N)
        self._write("offsets", self.num_tokens + np.cumsum(lengths_B))
        self._write("origins", origins_B2)
        self._write("labels", labels_B)
        self.num_tokens += int(lengths_B.sum())

    def commit(self, report: PrepareReport, brackets: Sequence[tuple[str, str]]) -> RowStore:
        """Flush everything, rename the folder, and open it."""
        digests = {name: column.digest.hexdigest() for name, column in self.columns.items()}
        for column in self.columns.values():
            _flush(column.file)
        meta = {
            "version": FORMAT_VERSION,
            "sha256": digests,
            "brackets": list(brackets),
            "report": report.to_json(),
        }
        with open(self.hidden / "meta.json", "wb") as file:
            file.write(json.dumps(meta).encode())
            _flush(file)
        sync_folder(self.hidden)
        # Open before renaming: the maps stay valid whatever another builder does.
        store = RowStore(self.hidden, meta)
        _publish(self.hidden, self.folder)
        return store


def _publish(hidden: Path, folder: Path) -> None:
    """Rename into place, unless another process was first. A damaged folder is moved away."""
    for _ in range(10):
        try:
            os.rename(hidden, folder)
            sync_folder(folder.parent)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        # Another process built the same store first; its rows are the same.
        if open_store(folder) is not None:
            return
        aside = hidden.with_name(f"{hidden.name}.damaged")
        try:
            os.rename(folder, aside)
        except FileNotFoundError:
            continue
        _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what a killed builder of this store left behind."""
    for hidden in folder.parent.glob(f".{folder.name}.*"):
        try:
            newest = max(path.stat().st_mtime for path in (hidden, *hidden.glob("*")))
        except OSError:
            continue  # its builder is renaming it at this moment
        if time.time() - newest > ABANDONED_AFTER_S:
            _remove(hidden)


def _map(folder: Path, name: str) -> np.ndarray:
    return np.memmap(folder / f"{name}.bin", dtype=_DTYPES[name], mode="r")


def _content_digest(digests: dict[str, str], *, is_labelled: bool) -> str:
    names = ("tokens", "weights", "offsets", *(("labels",) if is_labelled else ()))
    joined = "".join(digests[name] for name in names)
    return hashlib.sha256(joined.encode()).hexdigest()


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
