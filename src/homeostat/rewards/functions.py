"""The built-in rewards, and the loader of users' own.

A reward is a function that is called as TRL does, and the built-in ones follow the same convention:

    f(completions=, prompts=, completion_ids=, trainer_state=, <column>=, ...) -> list[float | None]

with one entry per sample everywhere. An exception in place of a value means that the function
failed on this sample. `load_reward(type, settings)` makes one from the keys of its config class. It
runs in a worker process, where a pattern that backtracks forever or a task that hangs meets the
time limit. Nothing heavy is imported before the reward that needs it is loaded.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from homeostat.errors import MissingDependencyError, RewardError, UserCodeError
from homeostat.user_code import load_object

RewardFunction = Callable[..., Any]
Message = Mapping[str, Any]

# Seconds that math-verify may spend on one sample, for parsing and again for comparing. It returns
# "not equal" if it could not finish, so a sample that took this long and was not found right has
# failed, because nobody knows what it deserves. The group's other samples keep their values.
MATH_SECONDS = 1
# The limit is one of the clock: a sample that a busy machine kept waiting gets this many times it.
MATH_PATIENCE = 20
# What math-verify takes for no limit. The call as a whole has one: rewards.timeout_s.
UNLIMITED = 0
# What scorers of tasks raise for answers that they cannot read: only that sample has no value.
_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
_DELIMITERS = re.compile(r"\$|\\boxed|\\\(|\\\[")
_WORDS = re.compile(r"[^\W\d_]{2,}")
_NAMES = ("pi", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp")
_NAMED = re.compile(rf"(?<![\\A-Za-z])({'|'.join(_NAMES)})(?![A-Za-z])")
# A number and a unit of one letter, a number with spaces between thousands, and a time or ratio.
_NUMBER = re.compile(
    r"[-+]?[\d.,/]+\s+[^\W\d_](?:\^?[23])?|[-+]?\d{1,3}(?: \d{3})+|[\d.:]*:[\d.:]*"
)
_SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d{1,3}")
_MIXED = re.compile(r"(\d+)\s+(\d+)/(\d+)")


def load_reward(type: str, settings: Mapping[str, Any]) -> RewardFunction:
    """Return the function of a reward. `settings` are the keys of its config class."""
    if type in _LOADERS:
        return _LOADERS[type](**settings)
    # Pydantic is imported only by a worker that has such a reward.
    from homeostat.config.plugins import load_plugin

    return load_plugin("reward", type)(type=type, **settings).score


def text_of(completion: str | Sequence[Message]) -> str:
    """Return a completion's text; for conversational prompts it is a list with one message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def exact_match(*, column: str, extract: str | None, ignore_case: bool) -> RewardFunction:
    """Return a reward that compares the answer with the expected text."""
    find = _finder(extract)

    def score(completions: list[Any], **columns: Any) -> list[float | None]:
        return [
            _match(find(text_of(completion)), expected, ignore_case=ignore_case)
            for completion, expected in zip(completions, _column(columns, column), strict=True)
        ]

    return score


def regex_format(*, pattern: str) -> RewardFunction:
    """Return a reward that matches the completion against a pattern."""
    whole = re.compile(pattern, re.DOTALL)

    def score(completions: list[Any], **columns: Any) -> list[float | None]:
        return [float(whole.fullmatch(text_of(text)) is not None) for text in completions]

    return score


def length(*, free_tokens: int, max_tokens: int) -> RewardFunction:
    def score(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        over = [len(ids) - free_tokens for ids in completion_ids]
        return [0.0 - min(1.0, max(0.0, n / (max_tokens - free_tokens))) for n in over]

    return score


def math_verify(*, column: str) -> RewardFunction:
    """Return a reward that compares answers with math-verify."""
    package = _import("math_verify", package="math-verify", reward="math_verify")
    # The first call loads grammars, which must not count towards a sample's time.
    one = package.parse("$1$", parsing_timeout=UNLIMITED)
    package.verify(one, one, timeout_seconds=UNLIMITED)

    @lru_cache(maxsize=1024)
    def read_expected(text: str) -> Any:
        # Without delimiters math-verify takes one number for the answer: 2 of \sqrt{2} and 2x+1.
        found = [] if _is_formula(text) else package.parse(text, parsing_timeout=UNLIMITED)
        found = found or package.parse(f"${_as_latex(text)}$", parsing_timeout=UNLIMITED)
        if not found:
            raise RewardError(f"math-verify cannot read the expected answer {text!r} ({column})")
        return found

    def verify(text: str, expected: Any) -> float | TimeoutError | None:
        if expected is None:
            return None
        gold = read_expected(_plain(expected))
        computed = time.process_time()
        for seconds in (MATH_SECONDS, MATH_PATIENCE * MATH_SECONDS):
            started = time.monotonic()
            found = package.parse(text, parsing_timeout=seconds)
            is_right = package.verify(gold, found, timeout_seconds=seconds)
            if is_right or time.monotonic() - started < seconds:
                return float(is_right)
            if time.process_time() - computed > MATH_SECONDS / 2:
                break  # it did compute; otherwise a busy machine kept it waiting
        return TimeoutError(f"math-verify did not finish within {MATH_SECONDS} s")

    def score(completions: list[Any], **columns: Any) -> list[float | TimeoutError | None]:
        pairs = zip(completions, _column(columns, column), strict=True)
        return [verify(text_of(completion), expected) for completion, expected in pairs]

    return score


def reasoning_gym(*, extract: str | None) -> RewardFunction:
    """Return a reward that uses the scorer of the row's own task.

    Rows of a reasoning_gym source have `task`, its options and the entry, both as JSON.
    """
    package = _import("reasoning_gym", package="reasoning-gym", reward="reasoning_gym")
    find = _finder(extract)

    @lru_cache(maxsize=256)
    def task_of(name: str, options: str) -> Any:
        return package.create_dataset(name, **json.loads(options))

    def graded(task: Any, answer: str | None, entry: str) -> float | Exception:
        try:
            return float(answer is not None and task.score_answer(answer, json.loads(entry)))
        except _UNREADABLE as error:
            return error

    def score(completions: list[Any], **columns: Any) -> list[float | Exception]:
        needed = [_column(columns, name) for name in ("task", "task_options", "entry")]
        return [
            graded(task_of(name, options), find(text_of(completion)), entry)
            for completion, name, options, entry in zip(completions, *needed, strict=True)
        ]

    return score


def function(*, path: str) -> RewardFunction:
    """Return the user's function, with the options of the recipe."""
    try:
        found = load_object(path, what="function")
    except UserCodeError as error:
        raise RewardError(str(error)) from error.__cause__
    if not callable(found):
        place, _, name = path.rpartition(":")
        raise RewardError(f"{path}: {place} has no function {name!r}")
    return found


def _is_formula(text: str) -> bool:
    """Return whether an expected answer is one formula without delimiters, and not prose with one.

    A quantity (5 m) is prose: its number is the answer.
    """
    if _DELIMITERS.search(text):
        return False
    words = {word.lower() for word in _WORDS.findall(text)}
    return "\\" in text or not (_NUMBER.fullmatch(text) or words - {"sqrt", *_NAMES})


def _as_latex(text: str) -> str:
    """Return a formula with its numbers and functions as LaTeX writes them."""
    if _SCIENTIFIC.fullmatch(text):
        return format(Decimal(text), "f")
    return _NAMED.sub(r"\\\1 ", _MIXED.sub(r"\1\\frac{\2}{\3}", text))


def _judge(**settings: Any) -> RewardFunction:
    from homeostat.rewards.judge import judge

    return judge(**settings)


def _reward_model(**settings: Any) -> RewardFunction:
    from homeostat.rewards.classifier import reward_model

    return reward_model(**settings)


_LOADERS: dict[str, Callable[..., RewardFunction]] = {
    "exact_match": exact_match,
    "regex_format": regex_format,
    "length": length,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "function": function,
    "judge": _judge,
    "reward_model": _reward_model,
}


def _finder(extract: str | None) -> Callable[[str], str | None]:
    """Return a function that finds the answer, by the pattern or as the whole completion.

    With a pattern it is the first group of the last match. An answer may have several lines
    (`<answer>(.*?)</answer>`), but one that ends with its line (`#### (.*)`) does so.
    """
    if extract is None:
        return str.strip
    patterns = re.compile(extract), re.compile(extract, re.DOTALL)

    def find(text: str) -> str | None:
        last = [match for pattern in patterns for match in deque(pattern.finditer(text), maxlen=1)]
        if not last:
            return None
        # Of two that begin at the same place, the one within its line is the first.
        match = max(last, key=re.Match.start)
        return (match.group(1 if match.re.groups else 0) or "").strip()

    return find


def _match(answer: str | None, expected: Any, *, ignore_case: bool) -> float | None:
    if expected is None:
        return None
    wanted = _plain(expected)
    if answer is None:
        return 0.0
    if ignore_case:
        return float(answer.casefold() == wanted.casefold())
    return float(answer == wanted)


def _plain(expected: Any) -> str:
    if not isinstance(expected, str | int | float):
        raise RewardError(f"the expected answer is no text or number: {expected!r}")
    # A table with a missing value holds all numbers of its column as floats: 72 as 72.0.
    is_whole = isinstance(expected, float) and expected.is_integer()
    return str(int(expected) if is_whole else expected).strip()


def _column(columns: Mapping[str, Any], name: str) -> Any:
    if name not in columns:
        from homeostat.config.reward_base import CALL_KEYWORDS

        known = ", ".join(sorted(columns.keys() - set(CALL_KEYWORDS))) or "none"
        raise RewardError(f"the row has no column {name!r} (it has: {known})")
    return columns[name]


def _import(module: str, *, package: str, reward: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        needed_for = f"the reward {reward}"
        raise MissingDependencyError.of(package, extra="tasks", needed_for=needed_for) from error


def source_of(path: str) -> bytes:
    """Return the file that a function's path names; empty if only an import could find it."""
    place = path.rpartition(":")[0]
    names = [place] if place.endswith(".py") else _module_files(place)
    for folder in (os.getcwd(), *sys.path):
        for name in names:
            file = Path(folder, name)
            if file.is_file():
                return file.read_bytes()
    return b""


def files_of(folder: str) -> list[tuple[str, int, int]]:
    """Return name, size and time of the files of a model, which tell whether it has changed."""
    files = sorted(file for file in Path(folder).glob("*") if file.is_file())
    return [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in files]


def _module_files(module: str) -> list[str]:
    place = module.replace(".", "/")
    return [f"{place}.py", f"{place}/__init__.py"]
