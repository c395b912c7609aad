"""Write a recipe from a few answers: keys with comments, before any size is chosen."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from homeostat.config.kind import RunKind
from homeostat.data.recognise import known_forms, recognise
from homeostat.errors import ConfigError, DataError, Problem
from homeostat.importing.render import recipe_lines


class Task(StrEnum):
    """Kinds of training that a newcomer distinguishes."""

    SFT = "sft"
    RL = "rl"
    PREFERENCES = "preferences"
    REWARD_MODEL = "reward_model"


class Method(StrEnum):
    """Which weights are trained."""

    AUTO = "auto"
    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


_KINDS = {
    Task.SFT: RunKind.SFT,
    Task.RL: RunKind.RL,
    Task.PREFERENCES: RunKind.PREFERENCE,
    Task.REWARD_MODEL: RunKind.REWARD_MODEL,
}
# Sources of texts that need not be put into a chat.
_PLAIN_TOO = frozenset(
    {"prompt_completion", "prompts", "preference", "unpaired_preference", "scored"}
)
BUILT_IN_REWARDS = ("exact_match", "math_verify")
# Columns in which datasets keep the expected answer. The first is the default of the rewards.
_ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "final_answer", "target", "expected")
# Fewer rows than this are all needed for training.
_MIN_HELD_OUT_ROWS = 100
_HELD_OUT_SHARE = 0.05
# The usual lengths, where the model takes more.
_MAX_LENGTH = 2048
_MAX_NEW_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Answers:
    """What the user said. `data` and `model` are paths, or names on the hub."""

    task: Task
    model: str
    data: str
    reward: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Facts about the first file: a row, and the number of rows. Both unknown if it is not here."""

    row: Mapping[str, Any] | None = None
    num_rows: int | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the model, as far as its files are here."""

    max_positions: int | None = None
    has_chat_template: bool = True


@dataclass(slots=True)
class Draft:
    """A raw recipe, and comments by dotted key."""

    raw: dict[str, Any]
    comments: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: Any, comment: str = "") -> None:
        """Set a value at a dotted key."""
        here = self.raw
        *sections, last = key.split(".")
        for part in sections:
            here = here.setdefault(part, {})
        here[last] = value
        if comment:
            self.comments[key] = comment

    def render(self, *, header: list[str]) -> str:
        """Return the recipe as text."""
        lines = [f"# {line}" for line in header]
        return "\n".join([*lines, *recipe_lines(self.raw, self.comments)]) + "\n"


def make_draft(answers: Answers, data: DataFacts, model: ModelFacts, *, folder: Path) -> Draft:
    """Return the recipe of these answers for a file in `folder`."""
    draft = Draft({"name": answers.name or default_name(answers)})
    draft.set("model.path", as_seen_from(answers.model, folder))
    source = source_of(answers.task, data.row)
    source["path"] = as_seen_from(answers.data, folder)
    if not model.has_chat_template and source.get("type") in _PLAIN_TOO:
        source["chat"] = False
        draft.comments["data.train.0.chat"] = "the model has no chat template"
    draft.set("data.train", [source])
    if data.row is None:
        where = "" if Path(answers.data).exists() else "not on this disk: "
        draft.comments["data.train.0.path"] = (
            f"{where}columns are recognised when it is read (homeostat inspect)"
        )
    _set_algorithm(draft, answers.task, source)
    if answers.task is Task.RL:
        reward = answers.reward or "exact_match"
        draft.set("rewards.functions", [reward_of(reward, folder)])
        if reward in BUILT_IN_REWARDS:
            _set_answer_column(draft, data.row)
    elif data.num_rows is not None and data.num_rows >= _MIN_HELD_OUT_ROWS:
        draft.set("data.validation_share", _HELD_OUT_SHARE, "held out to see whether it overfits")
    _set_lengths(draft, answers.task, model.max_positions)
    if answers.task is Task.RL:
        draft.set("trainer.max_steps", 200, "a first look; the same command with more goes on")
    return draft


def _set_algorithm(draft: Draft, task: Task, source: dict[str, Any]) -> None:
    if task is Task.RL:
        draft.set("algorithm.type", "grpo")
    elif task is Task.REWARD_MODEL:
        draft.set("algorithm.type", "reward_model")
    elif task is Task.PREFERENCES:
        kind = source.get("type")
        if kind == "unpaired_preference":
            draft.set("algorithm.type", "kto", "the rows are labelled one by one")
        else:
            draft.set("algorithm.type", "dpo", "the rows are pairs" if kind else "for pairs")


def _set_answer_column(draft: Draft, row: Mapping[str, Any] | None) -> None:
    """Name the column of the expected answers if it is not the default one."""
    if row is None or _ANSWER_COLUMNS[0] in row:
        return
    reward = draft.raw["rewards"]["functions"][0]
    found = next((name for name in _ANSWER_COLUMNS if name in row), None)
    reward["column"] = found or _ANSWER_COLUMNS[0]
    if found is None:
        draft.comments["rewards.functions.0.column"] = (
            f"no such column: name the one with the right answers, out of {', '.join(row)}"
        )


def _set_lengths(draft: Draft, task: Task, max_positions: int | None) -> None:
    """Stay within the positions of the model; defaults do where it has more."""
    if max_positions is None:
        return
    new = min(_MAX_NEW_TOKENS, max_positions // 2) if task is Task.RL else 0
    why = f"the model has {max_positions} positions"
    if task is Task.RL and new < _MAX_NEW_TOKENS:
        draft.set("rollout.max_new_tokens", new, why)
    if max_positions - new < _MAX_LENGTH:
        draft.set("data.max_length", max_positions - new, why)


def as_seen_from(path: str, folder: Path) -> str:
    """Return a path of the current folder as a recipe in `folder` names it; names stay as said."""
    if os.path.isabs(path) or not os.path.exists(path):
        return path
    return os.path.relpath(path, folder)


def default_name(answers: Answers) -> str:
    """Return a name of model and task, as a run folder may have it."""
    words = f"{Path(answers.model.rstrip('/')).name}_{answers.task}"
    return re.sub(r"[^a-z0-9.-]+", "_", words.lower()).strip("._-") or "run"


def reward_of(word: str, folder: Path) -> dict[str, Any]:
    """Return the reward that a word names: a built-in one, or file.py:function."""
    if word in BUILT_IN_REWARDS:
        return {"type": word}
    file, colon, function = word.rpartition(":")
    if not colon:
        known = ", ".join(BUILT_IN_REWARDS)
        what = f"{word!r} is neither a built-in reward ({known}) nor file.py:function."
        raise ConfigError([Problem("--reward", what)])
    return {"type": "function", "path": f"{as_seen_from(file, folder)}:{function}"}


def source_of(task: Task, row: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the source of rows with these columns; without a row they are recognised later."""
    if row is None:
        return {}
    kind = _KINDS[task]
    found = recognise(row, kind=kind)
    if found is None:
        raise DataError(
            f"--data: rows for {task} have the columns {', or '.join(known_forms(kind))}, and "
            f"these have {', '.join(row)}. Name the columns in the recipe (data.train[].columns)."
        )
    columns = {ours: _plain(theirs) for ours, theirs in found.columns.items()}
    return {"type": found.type, **({"columns": columns} if columns else {}), **found.settings()}


def _plain(names: str | tuple[str, ...]) -> str | list[str]:
    return names if isinstance(names, str) else list(names)
