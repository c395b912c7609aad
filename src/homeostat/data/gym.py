"""Rows made by a reasoning-gym task: a question, its answer, and all that its scorer needs.

    question, answer     as the task gives them
    task, task_options   what the `reasoning_gym` reward makes the task's scorer from (JSON text)
    entry                what it scores against: {question, answer, metadata} (JSON text)

Row i is drawn from (seed, i) alone, so the rows are the same in every process and on resume.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from typing import Any

from homeostat.config.data import ReasoningGymSource
from homeostat.data.sources import BadRowError, readable
from homeostat.errors import DataError, MissingDependencyError

# The source has keys of its own for these.
_OWN_KEYS = ("size", "seed")
# A task made of other tasks: its settings are lists, and each row has a scorer of its own.
_NOT_ALONE = "composite"

# What tasks have been seen to raise for settings that cannot work.
_TASK_ERRORS = (AssertionError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError)


class GymRows:
    """The rows of one source, made when they are asked for (see sources.RowSource)."""

    def __init__(self, source: ReasoningGymSource) -> None:
        self.source = source
        self.brackets = (f"reasoning_gym:{source.task}[", "]")
        self._dataset = _make_dataset(source)
        self._task_options = json.dumps(source.options, sort_keys=True)
        self._require_whole_entries()

    def __len__(self) -> int:
        return self.source.size

    def number(self, index: int) -> int:
        return index

    def row(self, index: int) -> dict[str, Any]:
        entry = self._entry(index)
        if not isinstance(entry["question"], str):
            raise BadRowError("wrong type", "the task's question is not text")
        return {
            "question": entry["question"],
            "answer": entry["answer"],
            "task": self.source.task,
            "task_options": self._task_options,
            "entry": _as_json(entry),
        }

    def _entry(self, index: int) -> dict[str, Any]:
        try:
            return self._dataset[index]
        except _TASK_ERRORS as error:
            raise DataError(
                f"reasoning_gym task {self.source.task!r} cannot make row {index}: "
                f"{_reason(error)}. Change its options."
            ) from None

    def _require_whole_entries(self) -> None:
        """Some tasks compare tuples, which JSON does not know, and would score all rows wrong."""
        entry = self._entry(0)
        try:
            copy = json.loads(_as_json(entry))
        except TypeError as error:
            raise DataError(
                f"reasoning_gym task {self.source.task!r} cannot be used: its entries are not "
                f"plain values ({error}), and a reward in another process needs them."
            ) from None
        answer = entry["answer"]
        expected = self._dataset.score_answer(answer, entry)
        if self._dataset.score_answer(answer, copy) != expected:
            raise DataError(
                f"reasoning_gym task {self.source.task!r} cannot be used: its scorer takes its "
                "own answer for wrong once the entry was sent to another process (it compares "
                "tuples with lists)."
            )


def _as_json(entry: dict[str, Any]) -> str:
    return json.dumps({name: entry[name] for name in ("question", "answer", "metadata")})


def _make_dataset(source: ReasoningGymSource) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise MissingDependencyError.of(
            "reasoning-gym", extra="tasks", needed_for=f"the reasoning_gym source {source.task!r}"
        ) from None
    tasks = sorted(set(DATASETS) - {_NOT_ALONE})
    if source.task not in tasks:
        near = difflib.get_close_matches(source.task, tasks, n=3) or tasks
        shown = readable(", ".join(near), max_chars=2000)
        raise DataError(f"reasoning_gym has no task {source.task!r}. There are: {shown}.")
    _check_options(source, DATASETS[source.task][1])
    try:
        return reasoning_gym.create_dataset(
            source.task, size=source.size, seed=source.seed, **source.options
        )
    except _TASK_ERRORS as error:
        raise DataError(
            f"reasoning_gym task {source.task!r} refuses its options: {_reason(error)}."
        ) from None


def _reason(error: Exception) -> str:
    return readable(str(error), max_chars=300) or type(error).__name__


def _check_options(source: ReasoningGymSource, config_class: Any) -> None:
    known = [field.name for field in dataclasses.fields(config_class)]
    for name in source.options:
        if name in _OWN_KEYS:
            raise DataError(
                f"reasoning_gym task {source.task!r}: {name} is a key of the source itself. Take "
                "it out of options."
            )
        if name not in known:
            shown = ", ".join(option for option in known if option not in _OWN_KEYS)
            raise DataError(
                f"reasoning_gym task {source.task!r} has no option {name!r}. It has: {shown}."
            )
