"""Read records of JSON lines and tables in batches: a column at a time, not a value.

A batch is taken as a whole if its steps increase and its values are plain numbers; otherwise it is
left to the reader of rows, which handles every special case but takes longer.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from homeostat.health.readers.common_names import sounds_like_metric
from homeostat.health.readers.dict_rows import NOT_METRICS, STEP_KEYS
from homeostat.health.readers.recorder import Recorder
from homeostat.health.readers.rows import MAX_STEP
from homeostat.types import FloatArray64, IntArray

BATCH = 2_048
_MAX_NAMES = 2_000
# Signs of JSON between two numbers of the same name -> those of a list of numbers.
_AS_LIST = bytes.maketrans(b":{}", b"  ,")
# A column of a batch: the indices of the records that have it (None: all), and the values.
Cells = tuple[IntArray | None, FloatArray64]


def take_json_lines(recorder: Recorder, lines: Sequence[bytes]) -> bool:
    """Take lines that are JSON objects with steps. Return False if they must go one by one."""
    alike = _columns_of_alike(lines)
    if alike is not None:
        return _take_numbers(recorder, alike)
    try:
        records = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return False
    if len(records) != len(lines) or not all(type(record) is dict for record in records):
        return False
    names = dict.fromkeys(chain.from_iterable(records))
    if len(names) > 64 + 4 * len(records[0]):
        return False
    step_key = _step_key(names)
    if step_key is None:
        return False
    columns = {name: [record.get(name) for record in records] for name in names}
    return take_columns(recorder, columns, step_key=step_key, form="jsonl")


def _step_key(names: Collection[str]) -> str | None:
    """Return the name of the step in records with these names; None if they are no metrics."""
    if len(names) > _MAX_NAMES or "train_runtime" in names:
        return None
    step_key = next((key for key in STEP_KEYS if key in names), None)
    return step_key if any(map(sounds_like_metric, names)) else None


def _take_numbers(recorder: Recorder, columns: Mapping[str, FloatArray64]) -> bool:
    step_key = _step_key(columns)
    steps = _whole(columns[step_key]) if step_key is not None else None
    if steps is None:
        return False
    cells: dict[str, Cells] = {
        name: (None, values)
        for name, values in columns.items()
        if name not in NOT_METRICS and name not in STEP_KEYS
    }
    return recorder.add_columns(steps, cells, form="jsonl")


def _columns_of_alike(lines: Sequence[bytes]) -> dict[str, FloatArray64] | None:
    """Return the columns of JSON objects with the same names in the same order and only numbers.

    None if they differ, or hold anything else. Such records are most of all metrics, and they are
    read several times as fast without making an object of each: cut at the quotes, every second
    piece is a name, and the others are the numbers between them.
    """
    names = lines[0].split(b'"')[1::2]
    width = 2 * len(names)
    pieces = b"\n".join(lines).split(b'"')
    if not names or len(pieces) != width * len(lines) + 1 or pieces[0].strip() != b"{":
        return None
    if len(set(names)) != len(names) or b"\\" in lines[0]:
        return None
    if pieces[1::2] != names * len(lines):
        return None
    columns: dict[str, FloatArray64] = {}
    for place, name in enumerate(names):
        values = _numbers(pieces[2 + 2 * place :: width])
        if values is None:
            return None
        columns[name.decode("utf-8", errors="replace")] = values
    return columns


def _numbers(pieces: list[bytes]) -> FloatArray64 | None:
    """Return the number in each piece (": 0.5, ", or ": 0.5}" and what follows); None if one has
    none.

    The colons and commas are counted, so that a piece with two numbers or none is noticed.
    """
    text = b"".join(pieces)
    if text.count(b":") != len(pieces) or b"nan" in text or b"inf" in text:
        return None
    text = text.translate(_AS_LIST)
    if text.count(b",") != len(pieces):
        return None
    with warnings.catch_warnings():
        # What is no number ends the parsing, which numpy only warns of.
        warnings.simplefilter("error")
        try:
            # A first number that is missing is the one mistake that numpy does not notice.
            float(text[: text.index(b",")])
            values = np.fromstring(text[: text.rindex(b",")], dtype=np.float64, sep=" , ")
        except (DeprecationWarning, ValueError):
            return None
    return values if len(values) == len(pieces) else None


def take_columns(
    recorder: Recorder, columns: Mapping[str, Sequence[Any]], *, step_key: str, form: str
) -> bool:
    """Take columns of equal length. Return False if steps or values are not plain numbers."""
    steps = _steps(columns[step_key])
    if steps is None:
        return False
    cells: dict[str, Cells] = {}
    for name, column in columns.items():
        if name in NOT_METRICS or name in STEP_KEYS or type(column[0]) is bool:
            continue
        found = _cells(column)
        if found is None:
            return False
        if len(found[1]):
            cells[name] = found
    return recorder.add_columns(steps, cells, form=form)


def _steps(column: Sequence[Any]) -> IntArray | None:
    if None in column:
        return None
    try:
        return _whole(np.array(column, dtype=np.float64))
    except (ValueError, TypeError, OverflowError):
        return None


def _whole(found: FloatArray64) -> IntArray | None:
    """Return numbers as steps; None if one of them cannot be a step."""
    if found.ndim != 1 or not np.all(
        (found >= 0) & (found < MAX_STEP) & (found == np.floor(found))
    ):
        return None
    return found.astype(np.int64)


def _cells(column: Sequence[Any]) -> Cells | None:
    """Return the numbers of a column; None if one of its values is anything else."""
    places = None
    if None in column or "" in column:
        kept = [place for place, value in enumerate(column) if value is not None and value != ""]
        places = np.array(kept, dtype=np.int64)
        column = [column[place] for place in kept]
    try:
        values = np.array(column, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
    return (places, values) if values.ndim == 1 else None
