"""What `homeostat check` learns by trying rewards on rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homeostat.config.rewards import RewardsConfig
from homeostat.rewards.trial import EMPTY, EXPECTED, LONG, TrialLine, try_rewards
from homeostat.types import Prompt


def prompts(**columns: Any) -> list[Prompt]:
    return [Prompt(n, np.array([1]), f"question {n}", columns) for n in range(5)]


def attempt(reward: dict[str, Any], **columns: Any) -> TrialLine:
    config = RewardsConfig.model_validate({"functions": (reward,), "timeout_s": 120.0})
    (line,) = try_rewards(config, prompts(**columns), encode=lambda text: [0] * len(text))
    assert line.label == config.functions[0].label
    return line


@pytest.mark.parametrize(
    ("reward", "columns"),
    [
        ({"type": "exact_match"}, {"answer": 42}),
        ({"type": "exact_match", "extract": r"<answer>\s*(.*?)\s*</answer>"}, {"answer": "x"}),
        ({"type": "exact_match", "extract": r"\\boxed\{(\d+)\}"}, {"answer": "7"}),
        ({"type": "exact_match", "extract": r"#### (.+)$"}, {"answer": "7"}),
        ({"type": "math_verify"}, {"answer": "\\sqrt{2}"}),
        ({"type": "math_verify", "column": "solution"}, {"solution": "so\n#### 3"}),
    ],
)
def test_the_expected_answer_earns_one(reward: dict[str, Any], columns: dict[str, Any]) -> None:
    line = attempt(reward, **columns)
    assert (line.level, line.facts["values"][EXPECTED]) == ("ok", [1.0] * 3)
    assert line.facts["values"][EMPTY] == [0.0] * 3
    assert "the expected answer -> 1" in line.text


def test_a_reasoning_gym_row_is_tried_with_its_own_answer() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    columns = {"task": "chain_sum", "task_options": "{}", "entry": json.dumps(entry)}
    line = attempt({"type": "reasoning_gym"}, **columns)
    assert (line.level, line.facts["values"][EXPECTED]) == ("ok", [1.0] * 3)


def test_length_is_tried_with_the_longest() -> None:
    line = attempt({"type": "length", "free_tokens": 20, "max_tokens": 30})
    assert line.facts["values"][LONG] == [-1.0] * 3
    assert line.level == "ok"


def test_a_missing_column_is_named() -> None:
    line = attempt({"type": "exact_match", "column": "truth"}, answer="x")
    assert not line.ok
    assert "no column 'truth' (it has: " in line.text
    assert "answer" in line.text


def test_a_format_that_nothing_tried_has_is_no_warning_but_one_that_all_have_is() -> None:
    assert attempt({"type": "regex_format", "pattern": "<a>.*</a>"}).level == "ok"
    assert attempt({"type": "regex_format", "pattern": ".*"}).level == "warning"


@pytest.mark.parametrize(
    ("code", "level", "hint"),
    [
        ("return [float(c == a) for c, a in zip(completions, answer)]", "ok", "answer -> 1"),
        ("return [0.5] * len(completions)", "warning", "the same for all"),
        ("return [None] * len(completions)", "warning", "no value"),
        ("return [len(c) / 0 for c in completions]", "error", "ZeroDivisionError"),
        ("return [float('nan')] * len(completions)", "error", "not_finite"),
        ("return [1.0]", "error", "it returned 1 values for 3 samples"),
        ("import time; time.sleep(100)", "error", "rewards.timeout_s"),
    ],
)
def test_a_function_is_shown_with_what_it_did(
    tmp_path: Path, code: str, level: str, hint: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def f(completions, answer):\n    {code}\n")
    reward = {"type": "function", "path": f"{file}:f"}
    # Short for the one that hangs alone: a busy machine may take long over the others.
    timeout_s = 1.0 if "sleep" in code else 120.0
    config = RewardsConfig.model_validate({"functions": (reward,), "timeout_s": timeout_s})
    rows = prompts(answer="42")[:1]
    (line,) = try_rewards(config, rows, encode=lambda text: [0] * len(text))
    assert (line.level, line.ok) == (level, level != "error")
    assert hint in line.text
    if level == "error":
        assert "question 0" in line.text


def test_one_that_does_not_import_does_not_hide_the_others() -> None:
    functions = ({"type": "function", "path": "nowhere.to.be:found"}, {"type": "exact_match"})
    config = RewardsConfig.model_validate({"functions": functions})
    bad, good = try_rewards(config, prompts(answer="1"), encode=lambda text: [0])
    assert (bad.ok, good.ok) == (False, True)
    assert "no module 'nowhere.to.be'" in bad.text


def test_without_rows_there_is_a_warning() -> None:
    config = RewardsConfig.model_validate({"functions": ({"type": "exact_match"},)})
    (line,) = try_rewards(config, [], encode=lambda text: [0])
    assert line.level == "warning"
