"""Read records of JSON lines and tables in batches: a column at a time, not a value.

A batch is taken as a whole if its steps increase and its values are plain numbers; otherwise it is
left to the reader of rows, which handles every special case but takes longer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
# A column of a batch: the indices of the records that have it (None: all), and the values.
Cells = tuple[IntArray | None, FloatArray64]


def take_json_lines(recorder: Recorder, lines: Sequence[bytes]) -> bool:
    """Take lines that are JSON objects with steps. Return False if they must go one by one."""
    try:
        records = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return False
    if len(records) != len(lines) or not all(type(record) is dict for record in records):
        return False
    names = dict.fromkeys(chain.from_iterable(records))
    if len(names) > _MAX_NAMES or len(names) > 64 + 4 * len(records[0]):
        return False
    step_key = next((key for key in STEP_KEYS if key in names), None)
    if step_key is None or "train_runtime" in names or not any(map(sounds_like_metric, names)):
        return False
    columns = {name: [record.get(name) for record in records] for name in names}
    return take_columns(recorder, columns, step_key=step_key, form="jsonl")


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
        found = np.array(column, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
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
