"""Validate the answers of a reward worker as untrusted input.

Our own code in the worker writes the answers, but it shares its process with users' code, which may
have replaced the json module, written to the channel itself, or logged a gigabyte. Whatever arrives
is either turned into the values below or refused as a whole with BadAnswerError, so no field of it
can raise later in the trainer. The limits are those that the worker's own code respects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from homeostat.rewards.calls import (
    MAX_EXTRA_CHARS,
    MAX_INTEGER,
    MAX_LOGGED_NAMES,
    MAX_LOGGED_VALUES,
    MAX_MESSAGE_CHARS,
    MAX_REWARD,
    MAX_TRACEBACK_CHARS,
    check_logged_name,
)
from homeostat.rewards.groups import Scalar
from homeostat.rewards.problems import ProblemKind

# No list of rewards that failed to load is longer than this.
MAX_LOAD_CHARS = 20_000


class BadAnswerError(ValueError):
    """A worker's message that cannot be used. Its text says what is wrong."""


@dataclass(frozen=True, slots=True)
class CallProblem:
    """Why samples of a call have no value. `samples` are their indices in the group."""

    kind: ProblemKind
    message: str
    samples: tuple[int, ...]
    traceback: str


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """The validated answer to one call."""

    values: list[float | None]
    problems: tuple[CallProblem, ...]
    metrics: dict[str, list[float]]
    extras: dict[str, list[Scalar]]

    @property
    def failed(self) -> frozenset[int]:
        """Return the samples on which the reward failed, without those that got an honest None."""
        errors = (problem for problem in self.problems if problem.kind.is_error)
        return frozenset(sample for problem in errors for sample in problem.samples)


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A reward that the worker could not load."""

    label: str
    message: str
    is_missing_package: bool
    traceback: str


def read_answer(message: Mapping[str, Any], *, num: int) -> CallAnswer:
    """Validate the answer to a call for `num` samples. Raises BadAnswerError."""
    values = _list(message, "values")
    if len(values) != num:
        raise BadAnswerError(f"{len(values)} values for {num} samples")
    for value in values:
        if value is not None and not _is_reward(value):
            raise BadAnswerError(f"a value is {_shown(value)}")
    problems = tuple(_problem(item, num=num) for item in _list(message, "problems"))
    _require_one_reason_each(values, problems)
    return CallAnswer(
        values=values,
        problems=problems,
        metrics=_logged(_dict(message, "metrics")),
        extras={
            _name(name): _cells(cells, num=num) for name, cells in _dict(message, "extras").items()
        },
    )


def read_load_failures(message: Mapping[str, Any]) -> list[LoadFailure]:
    """Validate a worker's first message: the rewards that do not load. Raises BadAnswerError."""
    failures = []
    for item in _list(message, "failed"):
        if not isinstance(item, dict):
            raise BadAnswerError(f"a failure is {_shown(item)}")
        texts = {name: _text(item, name, MAX_LOAD_CHARS) for name in ("label", "message")}
        traceback = _text(item, "traceback", MAX_LOAD_CHARS)
        failures.append(
            LoadFailure(texts["label"], texts["message"], item.get("missing") is True, traceback)
        )
    return failures


def _is_reward(value: Any) -> bool:
    # Not isinstance: True is an int, and a reward must be a float at this point.
    return type(value) is float and math.isfinite(value) and abs(value) <= MAX_REWARD


def _problem(item: Any, *, num: int) -> CallProblem:
    if not isinstance(item, dict):
        raise BadAnswerError(f"a problem is {_shown(item)}")
    samples = _list(item, "samples")
    if not samples or not all(type(sample) is int and 0 <= sample < num for sample in samples):
        raise BadAnswerError("a problem names samples that the group does not have")
    try:
        kind = ProblemKind(item.get("kind"))
    except ValueError as error:
        raise BadAnswerError(f"{_shown(item.get('kind'))} is no kind of problem") from error
    return CallProblem(
        kind=kind,
        message=_text(item, "message", MAX_MESSAGE_CHARS),
        samples=tuple(samples),
        traceback=_text(item, "traceback", MAX_TRACEBACK_CHARS),
    )


def _require_one_reason_each(values: list[float | None], problems: tuple[CallProblem, ...]) -> None:
    """Require that a sample has a value, or exactly one reason why it has none."""
    named = sorted(sample for problem in problems for sample in problem.samples)
    without = [sample for sample, value in enumerate(values) if value is None]
    if named != without:
        raise BadAnswerError("samples without a value are not the ones that its problems name")


def _logged(metrics: dict[Any, Any]) -> dict[str, list[float]]:
    if len(metrics) > MAX_LOGGED_NAMES:
        raise BadAnswerError(f"{len(metrics)} metrics")
    found = {}
    for name, values in metrics.items():
        if not isinstance(values, list) or len(values) > MAX_LOGGED_VALUES:
            raise BadAnswerError(
                f"the metric {_shown(name)} has no list of values of a usable size"
            )
        if not all(type(value) is float for value in values):
            raise BadAnswerError(f"the metric {_shown(name)} has a value that is no number")
        found[_name(name)] = values
    return found


def _cells(cells: Any, *, num: int) -> list[Scalar]:
    if not isinstance(cells, list) or len(cells) != num:
        raise BadAnswerError("a column of log_extra has no value for each sample")
    for cell in cells:
        if cell is None or isinstance(cell, bool | float):
            continue
        is_text = isinstance(cell, str) and len(cell) <= MAX_EXTRA_CHARS
        is_number = isinstance(cell, int) and abs(cell) <= MAX_INTEGER
        if not (is_text or is_number):
            raise BadAnswerError(f"a cell of log_extra is {_shown(cell)}")
    return cells


def _name(name: Any) -> str:
    try:
        return check_logged_name(name)
    except ValueError as error:
        raise BadAnswerError(str(error)) from error


def _text(item: Mapping[str, Any], name: str, limit: int) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadAnswerError(f"{name} is {_shown(value)}")
    # The end of an error is the informative part; a lone surrogate could not be written anywhere.
    return value[-limit:].encode("utf-8", errors="backslashreplace").decode("utf-8")


def _list(message: Mapping[str, Any], name: str) -> list[Any]:
    value = message.get(name)
    if not isinstance(value, list):
        raise BadAnswerError(f"{name} is {_shown(value)}")
    return value


def _dict(message: Mapping[str, Any], name: str) -> dict[Any, Any]:
    value = message.get(name)
    if not isinstance(value, dict):
        raise BadAnswerError(f"{name} is {_shown(value)}")
    if len(value) > MAX_LOGGED_NAMES:
        raise BadAnswerError(f"{name} has {len(value)} entries")
    return value


def _shown(value: Any) -> str:
    """Return a few characters of any value; its repr could be as large as a frame."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, str):
        return ascii(value[:60])
    return f"a {type(value).__name__}"
