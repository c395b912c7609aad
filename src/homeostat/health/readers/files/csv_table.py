"""Read CSV or TSV tables of metrics with a header, such as the exports of trackers.

step,train_loss,val_loss          Step,"run - train/loss","run - train/loss__MIN"
Wall time,Step,Value              a download of TensorBoard; the file's name tells the metric
#{"t_start": 1769605749.3}        the Monitor of Gym and Stable-Baselines: an episode's reward,
r,l,t                             length and time
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import PurePath

import numpy as np

from homeostat.health.readers.files.column_batches import BATCH, take_columns
from homeostat.health.readers.lines.dict_rows import STEP_KEYS, row_of
from homeostat.health.readers.rows.recorder import Recorder
from homeostat.health.readers.values.common_names import metric_of, sounds_like_metric
from homeostat.health.readers.values.numbers import number
from homeostat.health.readers.views.build import Found
from homeostat.health.reading import Reading
from homeostat.health.view import Series

_MAX_COLUMNS = 5_000
_EDGES = ("__MIN", "__MAX")
# Columns of a Monitor -> the names that other loggers give them.
_MONITOR = {"r": "episode_reward", "l": "episode_length", "t": "time_elapsed"}
_TRAINED = frozenset({"train/loss", "reward", "grad_norm"})
_DOWNLOAD = ["Wall time", "Step", "Value"]
_HELD_OUT = re.compile(r"(?:^|[-_.])(?:val|valid|validation|eval|test|dev)$", re.IGNORECASE)
# A column must be empty in this many last rows, and in this share of all rows, to count as NaN.
_MIN_LOST, _LOST_SHARE = 5, 0.1


def is_table(head: str) -> bool:
    """Return whether a text begins with a header of names and a row with as many numbers."""
    lines = [line for line in head.splitlines()[:4] if line.strip() and line[:2] != "#{"]
    if len(lines) < 2:
        return False
    sign = _separator(lines[0])
    first, second = (_cells(line, sign) for line in lines[:2])
    if not 2 <= len(first) == len(second) <= _MAX_COLUMNS:
        return False
    names = _names(first)
    numbers = [number(cell) is not None or not cell for cell in second]
    is_named = all(number(name) is None and len(name) < 200 for name in names if name)
    # A printed literal also has commas.
    is_named = is_named and all(names) and not any(mark in lines[0] for mark in "{}[")
    # In a table with a column of steps, numbers are metrics whatever their names.
    speaks = any(sounds_like_metric(name) or name in STEP_KEYS for name in names)
    return is_named and speaks and sum(numbers) >= len(numbers) / 2


def found_in(lines: Iterator[str], *, name: str) -> Found:
    """Read all rows of a table. Rows with a different number of cells are skipped."""
    recorder = Recorder()
    header = next(lines, "").lstrip("\ufeff")
    num_lines = 1
    if header.startswith("#{"):
        header, num_lines = next(lines, ""), 2
    sign = _separator(header)
    names = _names(_cells(header, sign))
    if names == _DOWNLOAD:
        names = ["wall_time", "step", _downloaded(name)]
    while batch := list(islice(lines, BATCH)):
        num_lines += len(batch)
        rows = [
            cells for cells in (_cells(line, sign) for line in batch) if len(cells) == len(names)
        ]
        if rows:
            _take(recorder, names, rows)
    return Found(
        series=_with_lost(recorder.series()),
        forms=recorder.forms,
        sources=[name],
        reading=Reading(num_lines=num_lines),
    )


def _with_lost(series: dict[str, Series]) -> dict[str, Series]:
    """Return the columns; add NaN where a column is filled at first and empty at the end.

    Writers of tables print nothing for NaN.
    """
    longest = max(series.values(), key=len, default=None)
    if longest is None:
        return series
    found = dict(series)
    for name, column in series.items():
        if metric_of(name) not in _TRAINED or not len(column):
            continue
        is_later = longest.steps > column.steps[-1]
        lost, before = int(is_later.sum()), int((~is_later).sum())
        is_dense = len(column) >= 0.9 * before
        if is_dense and lost >= max(_MIN_LOST, _LOST_SHARE * len(longest)):
            steps = np.concatenate([column.steps, longest.steps[is_later]])
            found[name] = Series(steps, np.concatenate([column.values, np.full(lost, np.nan)]))
    return found


def _downloaded(path: str) -> str:
    """Return the metric that a download of TensorBoard holds: "run-exp1_train-tag-loss.csv"."""
    if not path.endswith(".csv"):
        return "Value"
    stem = PurePath(path).name.removesuffix(".csv")
    run, sign, tag = stem.rpartition("tag-")
    is_plain = metric_of(tag) == "train/loss"
    is_held_out = bool(sign) and _HELD_OUT.search(run.rstrip("-_")) is not None
    return "eval_loss" if is_plain and is_held_out else tag


def _take(recorder: Recorder, names: list[str], rows: list[list[str]]) -> None:
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    wanted = {name: column for name, column in columns.items() if not name.endswith(_EDGES)}
    step_key = next((key for key in STEP_KEYS if key in wanted), None)
    if step_key and take_columns(recorder, wanted, step_key=step_key, form="csv"):
        return
    for cells in rows:
        row = row_of({name: cell for name, cell in zip(names, cells, strict=True) if cell})
        if row is None:
            continue
        row.form = "csv"
        epoch = row.values.get("epoch")
        if epoch is not None and epoch == int(epoch):
            # Steps may count from 1 again in every epoch.
            row.epoch = int(epoch), None
        recorder.add(row)


def _separator(header: str) -> str:
    return max(",\t;", key=header.count)


def _cells(line: str, sign: str) -> list[str]:
    if '"' not in line:
        return [cell.strip() for cell in line.rstrip("\r\n").split(sign)]
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=sign), [])]
    except csv.Error:
        return []


def _names(cells: list[str]) -> list[str]:
    """Return the names of a header. An empty first name is that of pandas' index."""
    names = [_name(cell) for cell in cells]
    if names[:3] == [*_MONITOR]:
        names[:3] = _MONITOR.values()
    if names and not names[0] and "step" not in names:
        names[0] = "step"
    return names


def _name(cell: str) -> str:
    """Return the metric's name without the run's name that a tracker puts before it."""
    return cell.rpartition(" - ")[2].strip().strip('"')
