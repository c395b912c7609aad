"""Try every reward on real rows before a run starts; `homeostat check` shows the results.

Each is called as in a run, in its own worker, on the first rows, with completions whose value is
known: the expected answer if the row has one, an empty text, and the prompt's own text. A judge is
asked a single question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from homeostat.config.model_rewards import JudgeReward
from homeostat.config.rewards import (
    AnyReward,
    ExactMatchReward,
    FunctionReward,
    LengthReward,
    MathVerifyReward,
    ReasoningGymReward,
    RegexFormatReward,
    RewardsConfig,
)
from homeostat.errors import MissingDependencyError, RewardError
from homeostat.json_text import parse_json
from homeostat.observe import format as fmt
from homeostat.rewards.groups import ScoredGroup, UnscoredGroup
from homeostat.rewards.pool import RewardPool
from homeostat.rewards.problems import RewardProblem, shorten
from homeostat.rewards.workers import text_of_prompt
from homeostat.types import Prompt

EXPECTED, EMPTY, ECHO = "the expected answer", "nothing", "the prompt's text"
LONG = "max_tokens tokens"
# Columns in which data sets usually keep the expected answer, for functions, which do not name one.
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "target", "expected")

Encode = Callable[[str], list[int]]
Values = dict[str, list[float | None]]


@dataclass(frozen=True, slots=True)
class TrialLine:
    """The result of trying a reward. `facts` holds the same for programs."""

    label: str
    level: Literal["ok", "warning", "error"]
    text: str
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Return whether the reward can be used."""
        return self.level != "error"


def try_rewards(
    config: RewardsConfig,
    prompts: Sequence[Prompt],
    *,
    encode: Encode,
    num_prompts: int = 3,
    log_file: Path | None = None,
) -> list[TrialLine]:
    """Return one line per reward. `encode` tokenises completions for rewards that need tokens."""
    rows = list(prompts[:num_prompts])
    return [
        _try(reward, rows, config=config, encode=encode, log_file=log_file)
        for reward in config.functions
    ]


def _try(
    reward: AnyReward,
    prompts: list[Prompt],
    *,
    config: RewardsConfig,
    encode: Encode,
    log_file: Path | None,
) -> TrialLine:
    alone = config.model_copy(update={"functions": (reward,), "workers": 1})
    if isinstance(reward, JudgeReward):
        # A judge costs money: one question shows whether it answers and can be read.
        prompts = prompts[:1]
    attempts = [_attempts(reward, prompt) for prompt in prompts]
    groups = [
        _group(prompt, tried, reward, encode)
        for prompt, tried in zip(prompts, attempts, strict=True)
    ]
    problems: list[RewardProblem] = []
    try:
        with RewardPool(alone, on_problem=problems.append, log_file=log_file) as pool:
            scored = pool.score(groups, step=0, total_steps=1, evaluates=True)
    except (RewardError, MissingDependencyError) as error:
        return TrialLine(reward.label, "error", str(error))
    if errors := [problem for problem in problems if problem.kind.is_error]:
        return _failed(reward.label, errors)
    if isinstance(reward, JudgeReward) and scored:
        return _asked(reward, attempts[0], scored[0])
    return _judged(reward, _by_attempt(reward.label, attempts, scored))


def _attempts(reward: AnyReward, prompt: Prompt) -> dict[str, str]:
    """Return the completions to try, by name."""
    if isinstance(reward, JudgeReward):
        reference = prompt.columns.get(reward.reference_column)
        return (
            {ECHO: text_of_prompt(prompt.prompt)}
            if reference is None
            else {EXPECTED: str(reference)}
        )
    tried = {EMPTY: "", ECHO: text_of_prompt(prompt.prompt)}
    if isinstance(reward, LengthReward):
        tried[LONG] = ""
    expected = _expected(reward, prompt)
    return tried if expected is None else {EXPECTED: expected, **tried}


def _group(
    prompt: Prompt, tried: dict[str, str], reward: AnyReward, encode: Encode
) -> UnscoredGroup:
    ids = [encode(text) for text in tried.values()]
    if isinstance(reward, LengthReward):
        ids[list(tried).index(LONG)] = [0] * reward.max_tokens
    return UnscoredGroup(prompt, list(tried.values()), ids)


def _expected(reward: AnyReward, prompt: Prompt) -> str | None:
    """Return a completion that should earn 1, as far as one can be made."""
    match reward:
        case ExactMatchReward():
            return _in_pattern(reward.extract, prompt.columns.get(reward.column))
        case MathVerifyReward():
            return _boxed(prompt.columns.get(reward.column))
        case ReasoningGymReward():
            return _in_pattern(reward.extract, _entry_answer(prompt.columns.get("entry")))
        case FunctionReward():
            found = (prompt.columns.get(name) for name in ANSWER_COLUMNS)
            return next((str(value) for value in found if value is not None), None)
        case _:
            return None


def _in_pattern(extract: str | None, answer: Any) -> str | None:
    """Put the answer in the place of the pattern's group.

    '<answer>(.*)</answer>' gives '<answer>7</answer>'. This works for patterns that are plain text
    except for the group; another pattern finds nothing in the result.
    """
    if answer is None or extract is None:
        return None if answer is None else str(answer)
    around = re.fullmatch(r"(.*?)(?<!\\)\((?!\?).*?(?<!\\)\)[*+?]?(.*)", extract, re.DOTALL)
    if around is None:
        return str(answer)
    before, after = (re.sub(r"\\s[*+]?\??|\\(?=\W)|[$^]", "", part) for part in around.groups())
    return f"{before}{answer}{after}"


def _boxed(answer: Any) -> str | None:
    if answer is None:
        return None
    text = str(answer)
    is_whole = re.search(r"\$|\\boxed|\\\(|\\\[|\n", text)
    return text if is_whole else f"\\boxed{{{text}}}"


def _entry_answer(entry: Any) -> Any:
    try:
        return parse_json(entry)["answer"]
    except (TypeError, ValueError, KeyError):
        return None  # the reward's own call will report what is wrong with the row


def _by_attempt(label: str, attempts: list[dict[str, str]], scored: list[ScoredGroup]) -> Values:
    values: Values = {}
    for tried, group in zip(attempts, scored, strict=True):
        for name, value in zip(tried, group.values[label], strict=True):
            values.setdefault(name, []).append(value)
    return values


def _failed(label: str, errors: list[RewardProblem]) -> TrialLine:
    first = errors[0]
    text = f"row {first.prompt_id} ({first.kind}): {first.message}"
    if first.traceback_tail:
        text += f"\n{first.traceback_tail.rstrip()}"
    if first.completion is not None:
        text += f"\ncompletion: {first.completion!r}"
    kinds = sorted({problem.kind.value for problem in errors})
    text += f"\nprompt: {first.prompt!r}"
    return TrialLine(label, "error", text, {"kinds": kinds, "rows": [e.prompt_id for e in errors]})


def _asked(reward: JudgeReward, tried: dict[str, str], scored: ScoredGroup) -> TrialLine:
    """Say what the judge answered to its one question."""
    (value,), (answer,) = scored.values[reward.label], scored.extras[f"{reward.label}/answer"]
    assert value is not None, "a failed reward was reported before"
    calls = scored.metrics[f"{reward.label}/calls"][0]
    text = (
        f"{reward.model} was asked about {next(iter(tried))} and answered "
        f"{shorten(str(answer), 120)!r}, which is read as {fmt.number(value)} (between 0 and 1)"
    )
    if calls > 1:
        text += f", after {calls:.0f} calls"
    facts = {"values": {next(iter(tried)): [value]}, "answer": answer, "calls": calls}
    return TrialLine(reward.label, "ok", text, facts)


def _judged(reward: AnyReward, values: Values) -> TrialLine:
    shown = ", ".join(f"{name} -> {_show(values[name])}" for name in values)
    level, remark = _remark(reward, values)
    return TrialLine(reward.label, level, f"{shown}{remark}", {"values": values})


def _remark(reward: AnyReward, values: Values) -> tuple[Literal["ok", "warning"], str]:
    seen = {value for column in values.values() for value in column}
    if seen == {None}:
        return "warning", ": no value for any of them, so it would count for nothing"
    if not seen:
        return "warning", "there was no row to try it on"
    asks_for_format = isinstance(reward, RegexFormatReward) or getattr(reward, "extract", None)
    if seen == {0.0} and asks_for_format:
        return "ok", ": none of them has the format that it asks for"
    if not isinstance(reward, FunctionReward) and set(values.get(EXPECTED, [1.0])) - {1.0, None}:
        return "warning", ": the expected answer itself does not earn 1"
    if len(seen) > 1:
        return "ok", ""
    return "warning", ": the same for all, which teaches nothing if completions fare alike"


def _show(values: list[float | None]) -> str:
    """Return one number if all rows agree."""
    texts = ["none" if value is None else fmt.number(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else "/".join(texts)
