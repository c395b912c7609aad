"""Read records of JSON lines and tables in batches: a column at a time instead of a value.

A batch is read as a whole if its steps increase and its values are plain numbers. Otherwise it is
left to the reader of rows, which handles every special case but is slower.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from homeostat.arrays import FloatArray64, IntArray
from homeostat.health.readers.files.alike_lines import num_lines_of, values_of_alike
from homeostat.health.readers.lines.dict_rows import (
    NOT_METRICS,
    STEP_KEYS,
    TOTAL_KEYS,
    is_trained,
    is_transition,
    total_in,
)
from homeostat.health.readers.rows.recorder import Recorder
from homeostat.health.readers.rows.row import MAX_STEP
from homeostat.health.readers.values.common_names import sounds_like_metric

BATCH = 2_048
_MAX_NAMES = 2_000
# One column of a batch: the indices of the records that have it (None: all), and the values.
Cells = tuple[IntArray | None, FloatArray64]


def num_json_objects(block: bytes) -> int:
    """Return the number of lines if each line of a block looks like a JSON object, else 0."""
    if not block.startswith(b'{"') or not block.endswith(b"}"):
        return 0
    text = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(text == ord("\n"))
    if np.any(text[ends - 1] != ord("}")) or np.any(text[ends + 1] != ord("{")):
        return 0
    return len(ends) + 1


def take_json_block(recorder: Recorder, block: bytes, *, num_lines: int) -> bool:
    """Record JSON objects with steps, one per line. Return False to have them read one by one."""
    text = b"[" + block.replace(b"\n", b",") + b"]"
    try:
        records = parsed(text, is_long=num_lines >= BATCH)
    except (ValueError, RecursionError):
        return False
    if len(records) != num_lines or set(map(type, records)) != {dict}:
        return False
    if is_transition(records[0]):
        return False
    alike = _columns_of_alike(records)
    if alike is not None:
        return take_numbers(recorder, alike)
    names = dict.fromkeys(chain.from_iterable(records))
    if len(names) > 64 + 4 * len(records[0]):
        return False
    step_key = _step_key(names)
    if step_key is None or any(
        record.get(n, 0) is None for n in filter(is_trained, names) for record in records
    ):
        # A null in place of a loss may mean NaN, which depends on the rest of its row.
        return False
    columns = {name: [record.get(name) for record in records] for name in names}
    return take_columns(recorder, columns, step_key=step_key, form=_form_of(columns))


def columns_of_block(block: bytes) -> dict[str, FloatArray64] | None:
    """Return the columns of many JSON lines with the same names in order and only numbers.

    None if there are fewer than BATCH lines, if their names differ, or if a value is not a number.
    The result is the same as that of `_columns_of_alike` for the lines' objects.
    """
    num_lines = num_lines_of(block) if block.startswith(b'{"') else 0
    found = values_of_alike(block, num_lines=num_lines) if num_lines >= BATCH else None
    if found is None or len(found[0]) < 2:
        return None
    names, text = found
    try:
        values = parsed(text, is_long=True)
        # Packing accepts only numbers and bools.
        numbers = np.frombuffer(struct.pack(f"{len(values)}d", *values))
    except (ValueError, RecursionError, struct.error, OverflowError):
        return None
    if len(values) != num_lines * len(names):
        return None
    may_be_bool = np.flatnonzero((numbers == 0.0) | (numbers == 1.0))
    if any(type(values[place]) is bool for place in may_be_bool.tolist()):
        return None
    by_name = np.ascontiguousarray(numbers.reshape(num_lines, len(names)).T)
    return dict(zip(names, by_name, strict=True))


def parsed(text: bytes | bytearray, *, is_long: bool) -> Any:
    """Parse JSON as the standard library does. Raises ValueError or RecursionError.

    pydantic's parser reads numbers several times as fast, but must be imported first. It refuses
    some unusual texts that the standard library accepts; these are then parsed by the standard
    library.
    """
    if is_long:
        from pydantic_core import from_json

        try:
            return from_json(text, cache_strings="keys")
        except ValueError:
            pass
    return json.loads(text)


def _form_of(names: Collection[str]) -> str:
    """Return the name of the format of JSON lines, as far as their keys show it."""
    return "llamafactory" if "current_steps" in names else "jsonl"


def _step_key(names: Collection[str]) -> str | None:
    """Return the name of the step in records with these names; None if they are not metrics."""
    if len(names) > _MAX_NAMES or "train_runtime" in names:
        return None
    step_key = next((key for key in STEP_KEYS if key in names), None)
    return step_key if any(map(sounds_like_metric, names)) else None


def take_numbers(recorder: Recorder, columns: Mapping[str, FloatArray64]) -> bool:
    """Record columns of numbers. Return False if none of them is the step, or if steps go back."""
    step_key = _step_key(columns)
    steps = _whole(columns[step_key]) if step_key is not None else None
    if steps is None:
        return False
    cells: dict[str, Cells] = {
        name: (None, values)
        for name, values in columns.items()
        if name not in NOT_METRICS and name not in STEP_KEYS
    }
    return recorder.add_columns(steps, cells, form=_form_of(columns), total=_total(columns))


def _columns_of_alike(records: Sequence[dict[str, Any]]) -> dict[str, FloatArray64] | None:
    """Return the columns of records with the same names and only numbers, none of them a bool.

    None for other records. Most metrics are logged in such records, so their numbers are copied
    into one array without looking at each.
    """
    names = list(records[0])
    if len(names) < 2 or set(map(len, records)) != {len(names)}:
        return None
    try:
        rows = map(itemgetter(*names), records)
        # An array of doubles accepts only numbers and bools.
        flat = np.frombuffer(array("d", chain.from_iterable(rows)))
    except (KeyError, TypeError, OverflowError):
        return None
    by_name = flat.reshape(len(records), len(names)).T
    columns = {name: np.ascontiguousarray(by_name[place]) for place, name in enumerate(names)}
    if any(_has_bool(records, name, values) for name, values in columns.items()):
        return None
    return columns


def _has_bool(records: Sequence[dict[str, Any]], name: str, values: FloatArray64) -> bool:
    """Return whether any value is a bool. Only values that became 0 or 1 are checked."""
    may_be = np.flatnonzero((values == 0.0) | (values == 1.0))
    return any(type(records[place][name]) is bool for place in may_be.tolist())


def take_columns(
    recorder: Recorder, columns: Mapping[str, Sequence[Any]], *, step_key: str, form: str
) -> bool:
    """Record columns of equal length. Return False if steps or values are not plain numbers."""
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
    return recorder.add_columns(steps, cells, form=form, total=_total(columns))


def _total(columns: Mapping[str, Sequence[Any] | FloatArray64]) -> int | None:
    """Return the number of steps that the newest record says the run will have."""
    return total_in({key: columns[key][-1] for key in TOTAL_KEYS if key in columns})


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
