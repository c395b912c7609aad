"""Make one call of a reward, for one group or several, and interpret its answer. Runs in a worker.

The call follows TRL: all arguments by keyword, one list entry per sample. It improves on TRL in two
respects: a function without **kwargs receives only the arguments that it names, and a column that
it needs but the row lacks is named in the error. A function may return any iterable of numbers
(bool, numpy, tensors of one value); an entry that is not a number becomes None, and its kind of
failure is counted. An exception that is returned as an entry, not raised, means that the function
failed on that sample only.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Iterable, Mapping, Sequence, Sized
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from homeostat.errors import HomeostatError, RewardError
from homeostat.rewards.functions import RewardFunction
from homeostat.rewards.problems import ProblemKind, shorten, tidy

# Training uses rewards in float32.
MAX_REWARD = 3e38
MAX_MESSAGE_CHARS = 1000
MAX_TRACEBACK_CHARS = 4000
# Largest size of a cell in the completions table.
MAX_EXTRA_CHARS = 10_000
MAX_INTEGER = 2**63 - 1
# How much one call may pass to log_metric and log_extra.
MAX_LOGGED_NAMES = 100
MAX_LOGGED_VALUES = 10_000
MAX_NAME_CHARS = 100
# Columns that TRL does not pass on either, because the call has arguments of these names.
_TAKEN_COLUMNS = ("prompt", "completion", "completion_ids")
_NOT_THE_USERS = (str(Path(__file__).parent), "<frozen importlib")


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The part of TRL's trainer_state that functions receive."""

    global_step: int
    max_steps: int


@dataclass(frozen=True, slots=True)
class Call:
    """A group as the worker receives it."""

    prompt: str | list[dict[str, Any]]
    texts: list[str]
    completion_ids: list[list[int]]
    columns: Mapping[str, Any]
    state: TrainerState

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of the call."""
        num = len(self.texts)
        chat = not isinstance(self.prompt, str)
        completions = [
            [{"role": "assistant", "content": text}] if chat else text for text in self.texts
        ]
        columns = {
            name: _repeat(value, num)
            for name, value in self.columns.items()
            if name not in _TAKEN_COLUMNS
        }
        return columns | {
            "prompts": _repeat(self.prompt, num),
            "completions": completions,
            "completion_ids": [list(ids) for ids in self.completion_ids],
            "trainer_state": self.state,
        }

    def take(self, result: Any, answer: Answer) -> None:
        """Write what the function returned into the answer."""
        _judge(result, answer)


def merged_keywords(calls: Sequence[Call]) -> dict[str, Any]:
    """Return the keyword arguments of one call for the samples of several groups, in order.

    A column that the row of a group lacks is None for its samples.
    """
    parts = [call.keywords() for call in calls]
    merged: dict[str, Any] = {"trainer_state": calls[0].state}
    for name in dict.fromkeys(name for part in parts for name in part if name not in merged):
        merged[name] = []
        for part, call in zip(parts, calls, strict=True):
            merged[name] += part.get(name, [None] * len(call.texts))
    return merged


@dataclass(slots=True)
class Answer:
    """The answer that is sent to the parent, as JSON. `problems` has one entry per kind."""

    values: list[float | None]
    problems: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: Any) -> None:
        """Record a number for the metrics; reward functions call it."""
        name, number = _new_name(name, self.metrics), float(value)
        if len(self.metrics.get(name, ())) >= MAX_LOGGED_VALUES:
            raise ValueError(
                f"log_metric({name!r}) was called more than {MAX_LOGGED_VALUES} times for a group"
            )
        self.metrics.setdefault(name, []).append(number)

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Record values for the table of completions; reward functions call it."""
        cells = [_cell(value) for value in values]
        column = _new_name(column, self.extras)
        if len(cells) != len(self.values):
            samples = len(self.values)
            raise ValueError(f"log_extra({column!r}): {len(cells)} values for {samples} samples")
        self.extras[column] = cells

    def fail(self, kind: ProblemKind, message: str, *, tail: str = "") -> None:
        """Record that the call failed as a whole."""
        self.values = [None] * len(self.values)
        self.problems = [
            {
                "kind": kind,
                "message": tidy(message, MAX_MESSAGE_CHARS),
                "samples": list(range(len(self.values))),
                "traceback": tidy(tail, MAX_TRACEBACK_CHARS),
            }
        ]


def answer_call(
    reward: RewardFunction | BaseException,
    calls: Sequence[Call],
    *,
    options: Mapping[str, Any],
    runner: asyncio.Runner,
) -> Answer:
    """Call the function once for all samples and return its answer.

    This never raises: whatever user code does, except ending the process, becomes an answer.
    """
    answer = Answer([None] * sum(len(call.texts) for call in calls))
    if isinstance(reward, BaseException):
        answer.fail(ProblemKind.EXCEPTION, f"it does not load any more: {describe(reward)}")
        return answer
    try:
        logs = {"log_extra": answer.log_extra, "log_metric": answer.log_metric}
        given = calls[0].keywords() if len(calls) == 1 else merged_keywords(calls)
        result = reward(**_chosen(reward, given | logs, options))
        # One runner per worker: an async reward may keep connections between calls.
        if inspect.iscoroutine(result):
            result = runner.run(result)
        calls[0].take(result, answer)
    # Also SystemExit and KeyboardInterrupt: user code must not end the worker this way.
    except BaseException as error:
        answer.fail(ProblemKind.EXCEPTION, describe(error), tail=tail_of(error))
    return answer


def check_logged_name(name: Any) -> str:
    """Return the name that a function passes to log_metric or log_extra, if it is valid.

    Slashes, spaces, % and @ are allowed, as in W&B. Control characters are not, because names are
    printed.
    """
    if not isinstance(name, str):
        raise ValueError(f"a logged name is a {type(name).__name__}, not a text")
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
        raise ValueError(
            f"the logged name {shorten(name, 60)!r} cannot be used: a name has 1 to "
            f"{MAX_NAME_CHARS} printable characters and no space at either end"
        )
    return name


def _new_name(name: Any, table: Mapping[str, Any]) -> str:
    """Return the name if the table has it already or has room for it."""
    name = check_logged_name(str(name))
    if name not in table and len(table) >= MAX_LOGGED_NAMES:
        raise ValueError(f"a call logs more than {MAX_LOGGED_NAMES} names; {name!r} is too many")
    return name


def describe(error: BaseException) -> str:
    """Return 'KeyError: 3'; our own errors come without their class name."""
    if isinstance(error, HomeostatError):
        return str(error)
    return "".join(traceback.format_exception_only(error)).strip()


def tail_of(error: BaseException) -> str:
    """Return the traceback from the first line of the user's own code on."""
    trace = error.__traceback__
    # Frames of our own code would only distract from the user's line.
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        trace = trace.tb_next
    if trace is None:
        return ""
    return "".join(traceback.format_exception(type(error), error, trace))


def _repeat(value: Any, num: int) -> list[Any]:
    """Return a separate copy of a value for each sample, because a function may change it."""
    if value is None or isinstance(value, str | int | float):
        return [value] * num
    return [deepcopy(value) for _ in range(num)]


def _chosen(
    reward: RewardFunction, given: dict[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keywords that the function takes; all of them if it has **kwargs."""
    if clash := sorted(set(options) & set(given)):
        raise RewardError(f"options.{clash[0]} is also a column of the row: rename one of them")
    given = {**given, **options}
    parameters = _parameters(reward)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if missing:
        raise RewardError(
            f"the function needs {missing[0]!r}, which is neither a column of the row "
            f"nor one of its options (there are: {', '.join(sorted(given))})"
        )
    return {p.name: given[p.name] for p in named if p.name in given}


def _parameters(reward: RewardFunction) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(reward).parameters.values())
    except ValueError:  # a callable written in C
        return None


def _judge(result: Any, answer: Answer) -> None:
    num = len(answer.values)
    # The entries of a set have no order, so nobody knows whose they are.
    unusable = isinstance(result, str | bytes | bytearray | memoryview | Mapping | set | frozenset)
    if unusable or not isinstance(result, Iterable):
        kind = type(result).__name__
        answer.fail(ProblemKind.WRONG_TYPE, f"it returned a {kind}, not a list of {num} numbers")
        return
    # One more value than wanted is enough to know that there are too many.
    values = list(islice(result, num + 1))
    if len(values) != num:
        found = len(result) if isinstance(result, Sized) else f"{len(values)} or more"
        answer.fail(ProblemKind.WRONG_LENGTH, f"it returned {found} values for {num} samples")
        return
    for sample, value in enumerate(values):
        _place(value, sample, answer)


def _place(value: Any, sample: int, answer: Answer) -> None:
    if value is None:
        _note(answer, ProblemKind.NONE, sample, "it returned None: does not apply")
        return
    if isinstance(value, Exception):
        is_late = isinstance(value, TimeoutError)
        kind = ProblemKind.TIMEOUT if is_late else ProblemKind.EXCEPTION
        _note(answer, kind, sample, tidy(describe(value), MAX_MESSAGE_CHARS))
        return
    try:
        number = _number(value)
    except (TypeError, ValueError):
        text = f"it returned {shorten(repr(value), 100)}, which is no number"
        _note(answer, ProblemKind.WRONG_TYPE, sample, text)
        return
    if math.isfinite(number) and abs(number) <= MAX_REWARD:
        answer.values[sample] = number
    else:
        _note(answer, ProblemKind.NOT_FINITE, sample, f"it returned {number}")


def _number(value: Any) -> float:
    if isinstance(value, str | bytes | bytearray):
        raise TypeError("text is no number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _note(answer: Answer, kind: ProblemKind, sample: int, message: str) -> None:
    """Add a problem; samples with the same problem share an entry with the first one's message."""
    for problem in answer.problems:
        if problem["kind"] == kind:
            problem["samples"].append(sample)
            return
    answer.problems.append({"kind": kind, "message": message, "samples": [sample], "traceback": ""})


def _cell(value: Any) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool):
        return value
    # Convert subclasses (numpy's float64, an IntEnum) to plain numbers, which JSON can encode.
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and abs(value) <= MAX_INTEGER:
        return int(value)
    return shorten(str(value), MAX_EXTRA_CHARS)
