"""Distinguish training data from logs: rows of training examples say nothing about a run.

    {"prompt": "2 + 5 =", "completion": "7"}                    a question and its answer
    {"messages": [...]}   {"conversations": [...]}              a conversation
    {"prompt": "...", "chosen": "...", "rejected": "..."}       a preference
    {"text": "..."}                                             plain text

A row with a step, a reward or another metric belongs to a log, whatever texts it has, because runs
log their completions like this. An answer counts as text even if it has only digits.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from homeostat.errors import DataError
from homeostat.health.readers.input.source import HEAD_BYTES
from homeostat.health.readers.lines.dict_rows import STEP_KEYS
from homeostat.health.readers.values.common_names import folded, sounds_like_metric
from homeostat.health.readers.values.numbers import number
from homeostat.json_text import parse_json

_MAX_ROWS = 200
_MAX_COLUMNS = 12
_QUESTIONS = frozenset({"prompt", "instruction", "question", "problem", "query", "input"})
_ANSWERS = frozenset({
    "completion", "response", "output", "answer", "answers", "solution", "target", "ground_truth",
    "reward_model",
})  # fmt: skip
_PREFERENCE = frozenset({"chosen", "rejected"})
_WHOLE = frozenset({"messages", "conversations", "conversation", "text"})
_TEXTS = _QUESTIONS | _ANSWERS | _PREFERENCE | _WHOLE
# If a row with "text" also has one of these names, it is a line of a structured log.
_OF_LOGGERS = frozenset({
    "level", "levelname", "severity", "logger", "record", "timestamp", "time", "ts", "asctime",
})  # fmt: skip
_BETWEEN = re.compile(r"[\s,]*+")
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")


def refuse_examples(head: bytes, *, name: str) -> None:
    """Raise DataError if a file is training data, judged by its first HEAD_BYTES."""
    columns = columns_of_examples(head, name=name)
    if columns:
        raise DataError(_why(name, columns))


def refuse_example_file(path: Path) -> None:
    """Raise DataError if a file is training data. Accept any other path, also an unreadable one."""
    columns = columns_of_file(path)
    if columns:
        raise DataError(_why(str(path), columns))


def refuse_example_document(document: Any, *, name: str) -> None:
    """Raise DataError if a JSON document is training data, judged by the whole document."""
    for rows in _rows_of_document(document):
        columns = _columns(rows[:_MAX_ROWS])
        if columns:
            raise DataError(_why(name, columns))


def columns_of_file(path: Path) -> tuple[str, ...]:
    """Return the columns of a file of training data; () if it is none, or cannot be read."""
    try:
        if not path.is_file():
            return ()
        with path.open("rb") as file:
            return columns_of_examples(file.read(HEAD_BYTES), name=path.name)
    except OSError:
        return ()


def columns_of_examples(head: bytes, *, name: str) -> tuple[str, ...]:
    """Return the columns of training data, given the first bytes of a file; () if it is none."""
    is_whole = len(head) < HEAD_BYTES
    if not is_whole and not name.endswith(_SUFFIXES):
        # A console log may begin with training examples that the run prints.
        return ()
    text = head.decode("utf-8", errors="replace").lstrip("\ufeff \r\n\t")
    if text.startswith("{"):
        rows = _json_lines(text, is_whole=is_whole)
    elif text.startswith("["):
        rows = _json_array(text)
    elif name.endswith((".csv", ".tsv")):
        rows = _table(text, is_whole=is_whole)
    else:
        return ()
    return _columns(rows)


def names_of(columns: Sequence[str]) -> str:
    """Return the names of columns for a sentence."""
    more = f" and {len(columns) - _MAX_COLUMNS} more" if len(columns) > _MAX_COLUMNS else ""
    return ", ".join(column[:60] for column in columns[:_MAX_COLUMNS]) + more


def _why(name: str, columns: Sequence[str]) -> str:
    return (
        f"{name}: this looks like training data: columns {names_of(columns)}. The doctor reads "
        "logs and metrics: give it the run's folder, its console log or its metrics file."
    )


def _json_lines(text: str, *, is_whole: bool) -> list[Any]:
    """Return the parsed JSON lines; [] if a complete line is not JSON."""
    lines = text.split("\n")
    if not is_whole:
        # The last line is incomplete.
        lines.pop()
    found: list[Any] = []
    for line in lines:
        if not line.strip():
            continue
        try:
            found.append(parse_json(line))
        except ValueError:
            return []
    return found


def _json_array(text: str) -> list[Any]:
    """Return the first elements of an array; its end may be missing."""
    decoder, at = json.JSONDecoder(), 1
    found: list[Any] = []
    while len(found) < _MAX_ROWS:
        gap = _BETWEEN.match(text, at)
        try:
            value, at = decoder.raw_decode(text, gap.end() if gap else at)
        except (ValueError, RecursionError):
            return found
        found.append(value)
    return found


def _table(text: str, *, is_whole: bool) -> list[Any]:
    """Return the rows of a table by the names in its header; numeric cells become numbers."""
    lines = text.splitlines(keepends=True)
    sign = "\t" if lines and lines[0].count("\t") > lines[0].count(",") else ","
    try:
        rows = [row for row in csv.reader(lines[: 4 * _MAX_ROWS], delimiter=sign) if row]
    except csv.Error:
        return []
    if not is_whole and len(rows) > 2:
        rows.pop()
    names = [name.strip() for name in rows[0]] if rows else []
    found = [
        {name: _cell(name, cell) for name, cell in zip(names, row, strict=True)}
        for row in rows[1 : _MAX_ROWS + 1]
        if len(row) == len(names)
    ]
    # In a table of numbers, columns named after prompts or answers hold counts, not texts.
    texts = (row[name] for row in found for name in row if folded(name) in _TEXTS)
    return found if any(map(_is_words, texts)) else []


def _cell(name: str, cell: str) -> str | float:
    value = number(cell) if folded(name) not in _TEXTS else None
    return cell if value is None else value


def _rows_of_document(document: Any) -> Iterator[list[Any]]:
    """Yield the parts of a document that may be rows: at the top, below a key, or as columns."""
    if isinstance(document, list):
        yield document
    if not isinstance(document, Mapping):
        return
    lists = {name: part for name, part in document.items() if isinstance(part, list) and part}
    for part in lists.values():
        if isinstance(part[0], Mapping):
            yield part
    if len(lists) == len(document) and len({len(part) for part in lists.values()}) == 1:
        count = min(len(next(iter(lists.values()))), _MAX_ROWS)
        yield [{name: part[place] for name, part in lists.items()} for place in range(count)]


def _columns(rows: Sequence[Any]) -> tuple[str, ...]:
    """Return the names of the columns if all rows are training examples, else ()."""
    if not rows or not all(isinstance(row, Mapping) and _is_example(row) for row in rows):
        return ()
    return tuple(dict.fromkeys(str(name) for row in rows for name in row))


def _is_example(row: Mapping[Any, Any]) -> bool:
    names = {folded(str(name)) for name in row}
    is_preference = names >= _PREFERENCE
    is_answered = not names.isdisjoint(_QUESTIONS) and not names.isdisjoint(_ANSWERS)
    is_logged = "text" in names and not names.isdisjoint(_OF_LOGGERS)
    is_whole = not names.isdisjoint(_WHOLE) and not is_logged
    if not (is_preference or is_answered or is_whole):
        return False
    texts = [row[name] for name in row if folded(str(name)) in _TEXTS]
    if not any(isinstance(value, str | list | Mapping) for value in texts):
        return False
    others = {str(name): row[name] for name in row if folded(str(name)) not in _TEXTS}
    measured = [name for name, value in others.items() if not _is_words(value)]
    if any(name in STEP_KEYS or folded(name) == "epoch" for name in measured):
        return False
    # Preference pairs may include the scores by which they were chosen.
    if not is_preference and any(map(sounds_like_metric, measured)):
        return False
    num_decimals = sum(isinstance(one, float) and one % 1.0 != 0.0 for one in others.values())
    # If most columns are measured numbers, the text is a remark in a log.
    return len(texts) + len(others) - len(measured) > num_decimals


def _is_words(value: Any) -> bool:
    return isinstance(value, str) and number(value) is None
