"""Open the rows of a source: which files they are in, who reads these, and what columns are called.

    path, split, config -> files -> a reader each -> one sequence of rows -> columns renamed

`train`, `check` and `inspect` all open sources here, after names on the hub have become folders
(hub/resolve.py).
"""

from __future__ import annotations

import bisect
import itertools
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from homeostat.config.data import Source, SourcePlugin
from homeostat.config.loading.beside import not_there
from homeostat.data.column_map import MappedRows, theirs
from homeostat.data.dataset_folder import (
    ROW_FILES,
    choose_files,
    files_below,
    packing_of,
    read_readme,
    suffix_of,
)
from homeostat.data.plugin_rows import PluginRows
from homeostat.data.sources import (
    JsonLines,
    JsonList,
    Parquet,
    RowSource,
    SavedDataset,
    holds_list,
    index_files,
    listed_files,
    read_state,
    readable,
    saved_splits,
)
from homeostat.data.text_files import CsvRows, PackedLines
from homeostat.errors import DataError

KNOWN_KINDS = (
    "a .jsonl file (one JSON object per line), a .json file with a list of objects, a .csv, .tsv "
    "or .parquet file, a folder with such files or one written by datasets' save_to_disk"
)
COLUMNS_HINT = (
    "Name the right ones in `columns` of the source, or leave out its `type` to have them "
    "recognised."
)


def open_source(
    source: Source, *, columns: Sequence[str] | None, required: Sequence[str] = ()
) -> RowSource:
    """Open the rows of a source, under the names of columns that it reads.

    Only `columns` of Parquet and Arrow are read (None: all). Raises DataError if the files lack
    one of them, or of `required`.
    """
    mapping = source.columns
    wanted = None if columns is None else theirs(columns, mapping)
    rows: RowSource = (
        PluginRows(source)
        if isinstance(source, SourcePlugin)
        else open_rows(source.path, columns=wanted, split=source.split, config=source.config)
    )
    needed = theirs([*(columns or ()), *required, *mapping], mapping)
    _require_columns(rows, needed, source)
    return MappedRows(rows, mapping) if mapping else rows


def open_rows(
    path: str,
    *,
    columns: Sequence[str] | None,
    split: str | None = None,
    config: str | None = None,
) -> RowSource:
    """Open files; only `columns` of Parquet and Arrow are read and must exist (None: all)."""
    files = row_files(path, split=split, config=config)
    opened = [_open_file(str(file), columns) for file in files]
    return opened[0] if len(opened) == 1 else _Joined(path, opened)


def row_files(path: str, *, split: str | None = None, config: str | None = None) -> list[Path]:
    """Return the files, or the saved dataset's folder, that hold the rows of a split."""
    place = Path(path)
    if kind_of(path) != "folder":
        if split is not None or config is not None:
            what = "split" if split is not None else "config"
            raise DataError(f"{path}: {what} is set, but a single file cannot have one. Remove it.")
        return [place]
    if (place / "dataset_dict.json").is_file():
        return [place / _saved_split(place, split)]
    if (place / "state.json").is_file():
        if split is not None:
            raise DataError(f"{path}: split is set, but the folder has only one split. Remove it.")
        return [place]
    chosen = choose_files(
        files_below(place), read_readme(place), config=config, split=split, place=path
    )
    return [place / name for name in chosen.files]


def source_files(source: Source) -> list[Path]:
    """Return every file whose change would change the rows; none for a plug-in."""
    if isinstance(source, SourcePlugin):
        return []
    found: list[Path] = []
    for file in row_files(source.path, split=source.split, config=source.config):
        if not file.is_dir():
            found.append(file)
            continue
        state = read_state(file)
        names = [*listed_files(file, state, "_data_files"), *index_files(file, state)]
        found += [file / "state.json", *names]
    return found


def kind_of(path: str) -> str:
    """Return "folder", or the suffix of a plain file whose rows can be read."""
    if not path:
        raise DataError(f"a path is empty. Give {KNOWN_KINDS}.")
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError:
        raise DataError(not_there(path)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{path!r}: cannot be read: {reason}.") from None
    if stat.S_ISDIR(mode):
        return "folder"
    if not stat.S_ISREG(mode):
        raise DataError(f"{path}: it is neither a regular file nor a folder. Give {KNOWN_KINDS}.")
    suffix = suffix_of(path)
    if suffix not in ROW_FILES or (packing_of(path) and suffix == ".parquet"):
        shown = Path(path).suffix.lower() or "(none)"
        raise DataError(f"{path}: the kind {shown} is not known. Give {KNOWN_KINDS}.")
    return suffix


def _open_file(path: str, columns: Sequence[str] | None) -> RowSource:
    kind = kind_of(path)
    if kind == "folder":
        return SavedDataset(path, columns)
    if kind == ".parquet":
        return Parquet(path, columns)
    if kind in (".csv", ".tsv"):
        return CsvRows(path)
    if packing_of(path):
        return PackedLines(path)
    if kind == ".json" and holds_list(path):
        return JsonList(path)
    return JsonLines(path)


def _saved_split(folder: Path, split: str | None) -> str:
    splits = saved_splits(folder)
    if split in splits or (split is None and len(splits) == 1):
        return split or splits[0]
    shown = readable(", ".join(splits[:20]), max_chars=300)
    if split is None:
        raise DataError(f"{folder}: holds several splits. Set split to one of: {shown}.")
    raise DataError(f"{folder}: no split is named {split!r}. There are: {shown}.")


def _require_columns(rows: RowSource, needed: Sequence[str], source: Source) -> None:
    """Report a column that no row has once, and not for every row."""
    names: dict[str, None] = {}
    for index in range(len(rows)):
        names.update(dict.fromkeys(_names_of(rows, index)))
        if names.keys() >= set(needed):
            return
    missing = [name for name in needed if name not in names]
    # A file whose rows are all unreadable is judged row by row.
    if missing and names:
        shown = readable(", ".join(list(names)[:20]), max_chars=300)
        raise DataError(
            f"{source.path}: no column is named {missing[0]!r}. Its columns: {shown}. "
            f"{COLUMNS_HINT}"
        )


def _names_of(rows: RowSource, index: int) -> Sequence[str]:
    try:
        return list(rows.row(index))
    except DataError:
        return ()


class _Joined:
    """The rows of several files, one after the other, counted from 0 over all of them."""

    def __init__(self, path: str, parts: Sequence[RowSource]) -> None:
        self.brackets = (f"{path}[", "]")
        self.parts = parts
        self.ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self.ends[-1]

    def number(self, index: int) -> int:
        return index

    def row(self, index: int) -> dict[str, Any]:
        number = bisect.bisect_right(self.ends, index)
        return self.parts[number].row(index - (self.ends[number - 1] if number else 0))
