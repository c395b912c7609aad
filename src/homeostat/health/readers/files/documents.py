"""Find the metrics in a JSON document of any layout.

    [{"epoch": 1, "train_loss": 2.0}, ...]             rows, at the top or below any key
    {"train_loss": [2.0, 1.9], "val_loss": [...]}      columns, as Keras' History has them
    {"train": {"loss": [...]}, "val": {...}}           columns in groups
    {"1": {"loss": 2.0}, "2": {...}}                   rows by their step, also "epoch_1"
    {"loss": [{"step": 1, "value": 2.0}, ...]}         columns with their own steps
    {"loss": [[1, 2.0], ...]}

Of all parts of the document, the one with the most values under known names is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from homeostat.health.readers.lines.dict_rows import row_of
from homeostat.health.readers.rows.recorder import Recorder
from homeostat.health.readers.rows.row import Row
from homeostat.health.readers.values.common_names import metric_of, sounds_like_metric
from homeostat.health.readers.values.numbers import number_of

MIN_RECORDS = 3
_MAX_PARTS = 200
_MAX_DEPTH = 4
_STEP_KEY = re.compile(
    r"(?:(?:global_)?step|epoch|iter(?:ation)?|checkpoint)?[ _-]?(?P<step>\d{1,15})", re.IGNORECASE
)
_COUNTS = ("step", "steps", "global_step", "iteration", "iterations", "iter", "epoch", "epochs")


def record(document: Any, recorder: Recorder) -> str:
    """Record the metrics of a document. Return their layout; "" if there are no metrics."""
    best: list[Row] = []
    form, most = "", 0
    for kind, rows in _parts(document):
        known = sum(metric_of(name) is not None for row in rows for name in row.values)
        if len(rows) >= MIN_RECORDS and (not best or known > most):
            best, form, most = rows, kind, known
    for row in best:
        row.form = form
        recorder.add(row)
    return form


def _parts(document: Any) -> Iterator[tuple[str, list[Row]]]:
    """Yield every part of a document that may be metrics, as rows."""
    waiting = [(document, 0)]
    num_parts = 0
    while waiting and num_parts < _MAX_PARTS:
        part, depth = waiting.pop(0)
        num_parts += 1
        if isinstance(part, list):
            yield "rows", _rows(part)
        elif isinstance(part, Mapping):
            yield "columns", _columns(part)
            yield "rows by step", _numbered(part)
            yield "columns with steps", _stepped(part)
            inner = [one for one in part.values() if isinstance(one, list | Mapping)]
            if depth < _MAX_DEPTH:
                waiting += [(one, depth + 1) for one in inner[:_MAX_PARTS]]


def _rows(part: list[Any]) -> list[Row]:
    found = (row_of(one) for one in part if isinstance(one, Mapping))
    return [row for row in found if row is not None]


def _numbered(part: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a mapping from step to row."""
    found = {key: _STEP_KEY.fullmatch(key) for key in part}
    steps = {int(one["step"]): key for key, one in found.items() if one is not None}
    if len(steps) < MIN_RECORDS or len(steps) < 0.8 * len(part):
        return []
    rows = []
    for step, key in sorted(steps.items()):
        row = row_of(part[key]) if isinstance(part[key], Mapping) else None
        if row is not None:
            row.step = step if row.step is None else row.step
            rows.append(row)
    return rows


def _stepped(part: Mapping[str, Any]) -> list[Row]:
    """Return the rows of columns whose items have a step and a value."""
    rows: dict[int, dict[str, float]] = {}
    for name, items in part.items():
        if not isinstance(items, list) or not _is_result(name):
            continue
        for item in items:
            step, value = _pair(item)
            if step is not None and value is not None and 0 <= step < 1e15:
                rows.setdefault(int(step), {})[name] = value
    return [Row(rows[step], step) for step in sorted(rows)]


def _pair(item: Any) -> tuple[float | None, float | None]:
    """Return the step and the value of an item of a column; None for each that it lacks."""
    if isinstance(item, Mapping):
        return number_of(item.get("step")), number_of(item.get("value"))
    if isinstance(item, list) and len(item) == 2:
        return number_of(item[0]), number_of(item[1])
    return None, None


def _columns(part: Mapping[str, Any]) -> list[Row]:
    """Return the rows of columns of numbers.

    A column that is a little shorter lacks the first rows, such as a loss before the first update.
    For a much shorter one, which is logged less often, the rows are unknown; its values go to the
    first rows.
    """
    columns = {name: values for name, values in _named_columns(part) if len(values) >= MIN_RECORDS}
    if not any(map(_is_result, columns)):
        return []
    counts = next((name for name in _COUNTS if name in columns), None)
    longest = max(map(len, columns.values()))
    missing = {
        name: longest - len(own) if 2 * len(own) >= longest else 0 for name, own in columns.items()
    }
    rows = []
    for place in range(longest):
        values = {
            name: own[place - missing[name]]
            for name, own in columns.items()
            if 0 <= place - missing[name] < len(own)
        }
        step = values.get(counts) if counts and not counts.startswith("epoch") else None
        is_count = step is not None and step.is_integer() and 0 <= step < 1e15
        present = {name: value for name, value in values.items() if name != counts}
        rows.append(Row(present, int(step) if is_count and step is not None else place + 1))
    return rows


def _named_columns(
    part: Mapping[str, Any], *, before: str = ""
) -> Iterator[tuple[str, list[float]]]:
    for name, value in part.items():
        if isinstance(value, list):
            numbers = [_number(one) for one in value]
            if numbers and None not in numbers:
                yield f"{before}{name}", [one for one in numbers if one is not None]
        elif isinstance(value, Mapping) and not before:
            yield from _named_columns(value, before=f"{name}/")


def _number(value: Any) -> float | None:
    # JSON has no NaN, so many writers put null in its place.
    return float("nan") if value is None else number_of(value)


def _is_result(name: str) -> bool:
    return sounds_like_metric(name) and metric_of(name) not in {"learning_rate", "epoch"}
