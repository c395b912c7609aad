"""The built-in rewards, TRL's call, and what is made of a function's answer."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homeostat.config.loading.load import build_config
from homeostat.errors import ConfigError, MissingDependencyError, RewardError
from homeostat.rewards import functions
from homeostat.rewards.calls import Answer, Call, TrainerState, answer_call
from homeostat.rewards.functions import load_reward
from homeostat.rewards.problems import ProblemKind

CHAT = [{"role": "user", "content": "what is 6 x 7?"}]


def call_of(
    texts: list[str],
    columns: dict[str, Any] | None = None,
    *,
    prompt: Any = "what?",
    ids: list[list[int]] | None = None,
) -> Call:
    ids = ids or [[1] * len(text) for text in texts]
    return Call(prompt, texts, ids, columns or {}, TrainerState(3, 10))


def ask(reward: Any, call: Call, **options: Any) -> Answer:
    with asyncio.Runner() as runner:
        return answer_call(reward, [call], options=options, runner=runner)


def kinds(answer: Answer) -> dict[ProblemKind, list[int]]:
    return {problem["kind"]: problem["samples"] for problem in answer.problems}


def values_of(type: str, call: Call, **settings: Any) -> list[float | None]:
    answer = ask(load_reward(type, settings), call)
    assert not answer.problems, answer.problems
    return answer.values


def kind_of(value: Any) -> str:
    """A test's name must be the same in every process that collects it."""
    return value if isinstance(value, str) else type(value).__name__


@pytest.mark.parametrize("prompt", ["text", CHAT], ids=["text", "chat"])
def test_exact_match_reads_texts_and_chats(prompt: Any) -> None:
    call = call_of([" 42\n", "43", "", "the answer is 42"], {"answer": 42}, prompt=prompt)
    found = values_of("exact_match", call, column="answer", extract=None, ignore_case=False)
    assert found == [1, 0, 0, 0]


def test_a_whole_number_that_a_table_holds_as_a_float_is_compared_as_one() -> None:
    for number, text in ((72.0, "72"), (72.5, "72.5")):
        call = call_of([text, "7"], {"answer": number})
        found = values_of("exact_match", call, column="answer", extract=None, ignore_case=False)
        assert found == [1, 0]


@pytest.mark.parametrize(
    ("extract", "text", "value"),
    [
        (r"<answer>(.*?)</answer>", "<answer>1</answer> no, <answer> Yes </answer>", 1),
        (r"<answer>(.*?)</answer>", "<answer>Yes</answer> no, <answer>1</answer>", 0),
        (r"<answer>(.*?)</answer>", "Yes", 0),
        (r"<answer>(.*?)</answer>", "<answer>\n Yes\n</answer>", 1),
        (r"<answer>(.*?)</answer>", "<answer>1</answer> no\n<answer>\nYes\n</answer>", 1),
        (r"<answer>(.*?)</answer>", "<answer>\n1\n</answer>\n<answer>Yes</answer>\n", 1),
        (r"#### (.*)", "#### 1\n#### Yes\nand so on", 1),
        (r"\w+$", "I say Yes", 1),
        (r"a(x)?", "a", 0),
    ],
)
def test_the_last_match_is_the_answer(extract: str, text: str, value: float) -> None:
    call = call_of([text], {"truth": "Yes"})
    settings = {"column": "truth", "extract": extract}
    assert values_of("exact_match", call, ignore_case=False, **settings) == [value]


def test_case_matters_unless_told() -> None:
    call = call_of(["STRASSE"], {"answer": "straße"})
    settings = {"column": "answer", "extract": None}
    assert values_of("exact_match", call, ignore_case=True, **settings) == [1]
    assert values_of("exact_match", call, ignore_case=False, **settings) == [0]


def test_a_row_without_an_answer_is_left_out_and_one_without_the_column_is_an_error() -> None:
    reward = load_reward("exact_match", {"column": "answer", "extract": None, "ignore_case": False})
    assert kinds(ask(reward, call_of(["a", "b"], {"answer": None}))) == {ProblemKind.NONE: [0, 1]}
    answer = ask(reward, call_of(["a", "b"], {"solution": "a"}))
    assert kinds(answer) == {ProblemKind.EXCEPTION: [0, 1]}
    assert "no column 'answer'" in answer.problems[0]["message"]
    assert "solution" in answer.problems[0]["message"]
    answer = ask(reward, call_of(["a"], {"answer": ["a"]}))
    assert kinds(answer) == {ProblemKind.EXCEPTION: [0]}


def test_format_is_of_the_whole_completion() -> None:
    texts = ["<a>x\ny</a>", "<a>x</a> ", "", "see <a>x</a>"]
    found = values_of("regex_format", call_of(texts), pattern=r"<a>.*</a>")
    assert found == [1, 0, 0, 0]


def test_length_falls_linearly_between_its_limits() -> None:
    lengths = [0, 4, 5, 6, 7, 8, 100]
    call = call_of(["x"] * 7, ids=[[1] * n for n in lengths])
    found = values_of("length", call, free_tokens=4, max_tokens=8)
    assert found == [0, 0, -0.25, -0.5, -0.75, -1, -1]
    assert not any(value == 0 and math.copysign(1, value) < 0 for value in found)


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        ("42", "so it is \\boxed{42}", "\\boxed{41}"),
        (42, "42", "no idea"),
        ("\\frac{1}{2}", "$0.5$", "$2$"),
        ("\\sqrt{2}", "\\boxed{\\sqrt{2}}", "\\boxed{2}"),
        ("2\\sqrt{3}", "$\\sqrt{12}$", "$2$"),
        ("x^2+1", "$1+x^2$", "$x^2$"),
        ("3 + 4 = 7\n#### 7", "7", "3"),
        ("2x+1", "$2x+1$", "$2$"),
        ("6 - 5i", "\\boxed{6 - 5i}", "\\boxed{5}"),
        ("(1, 2)", "$(1, 2)$", "$2$"),
        ("3, 5, 7", "$3, 5, 7$", "7"),
        ("x > 3", "$x > 3$", "3"),
        ("2*pi", "$2\\pi$", "$2$"),
        ("sin(x)", "$\\sin x$", "$\\cos x$"),
        ("1 1/2", "$1\\frac{1}{2}$", "$1$"),
        ("1e5", "100000", "1"),
        (1e-7, "0.0000001", "1"),
        ("5 m", "5", "4"),
        ("5 apples", "5", "4"),
        ("1 000", "1000", "1"),
    ],
)
def test_math_is_compared_by_meaning(
    expected: Any, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By the clock: a busy machine must not make a wrong answer an unfinished one here.
    monkeypatch.setattr(functions, "MATH_SECONDS", 60)
    call = call_of([right, wrong, ""], {"answer": expected})
    assert values_of("math_verify", call, column="answer") == [1, 0, 0]


def test_math_that_is_not_finished_in_time_has_failed_and_is_not_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """math-verify says False of what it could not finish: here of everything that is not equal."""
    reward = load_reward("math_verify", {"column": "answer"})
    monkeypatch.setattr(functions, "MATH_SECONDS", 0)
    answer = ask(reward, call_of([r"\boxed{7}", r"\boxed{8}"], {"answer": "7"}))
    assert answer.values == [1.0, None]
    assert kinds(answer) == {ProblemKind.TIMEOUT: [1]}
    assert "did not finish" in answer.problems[0]["message"]


def test_math_that_a_busy_machine_kept_waiting_is_judged_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first attempt sleeps until it is too late, and so uses no processor time."""
    import math_verify

    parse, naps = math_verify.parse, iter([1.2])

    def parse_late(text: str, *, parsing_timeout: int) -> Any:
        time.sleep(next(naps, 0.0))
        return parse(text, parsing_timeout=parsing_timeout)

    reward = load_reward("math_verify", {"column": "answer"})
    monkeypatch.setattr(math_verify, "parse", parse_late)
    answer = ask(reward, call_of([r"\boxed{8}"], {"answer": "$7$"}))
    assert (answer.values, answer.problems) == ([0.0], [])


@pytest.mark.parametrize("task", ["chain_sum", "leg_counting"])
def test_reasoning_gym_rows_are_scored_by_their_own_task(task: str) -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, size=2, seed=3)[1]
    columns = {"task": task, "task_options": json.dumps({"seed": 3}), "entry": json.dumps(entry)}
    call = call_of([f"<a>{entry['answer']}</a>", "<a>x</a>", entry["answer"]], columns)
    assert values_of("reasoning_gym", call, extract="<a>(.*)</a>") == [1, 0, 0]
    assert values_of("reasoning_gym", call, extract=None)[2] == 1


def test_an_answer_that_a_task_cannot_read_fails_alone() -> None:
    import reasoning_gym

    # Its scorer raises ValueError for what are no numbers.
    task = "prime_factorization"
    entry = reasoning_gym.create_dataset(task, size=1, seed=3)[0]
    columns = {"task": task, "task_options": "{}", "entry": json.dumps(entry)}
    call = call_of([entry["answer"], "I do not know"], columns)
    answer = ask(load_reward("reasoning_gym", {"extract": None}), call)
    assert answer.values == [1, None]
    assert [problem["samples"] for problem in answer.problems] == [[1]]


def test_a_function_is_called_as_trl_calls_it() -> None:
    seen: dict[str, Any] = {}

    def reward(**keywords: Any) -> list[float]:
        seen.update(keywords)
        return [1.0, 2.0]

    columns = {"answer": "42", "tags": ["x"], "prompt": "dropped", "completion_ids": "dropped"}
    ask(reward, call_of(["a", "b"], columns, prompt=CHAT), strength=2)
    state, log_extra, log_metric = (
        seen.pop(key) for key in ("trainer_state", "log_extra", "log_metric")
    )
    assert (state.global_step, state.max_steps) == (3, 10)
    assert callable(log_extra)
    assert callable(log_metric)
    assert seen == {
        "prompts": [CHAT, CHAT],
        "completions": [
            [{"role": "assistant", "content": "a"}],
            [{"role": "assistant", "content": "b"}],
        ],
        "completion_ids": [[1], [1]],
        "answer": ["42", "42"],
        "tags": [["x"], ["x"]],
        "strength": 2,
    }


def test_what_a_function_changes_is_its_own() -> None:
    def reward(prompts: list[Any], tags: list[Any], **rest: Any) -> list[int]:
        prompts[0][0]["content"] = "changed"
        tags[0].append("changed")
        return [len(tags[1]), len(prompts[1][0]["content"])]

    call = call_of(["a", "b"], {"tags": ["x"]}, prompt=CHAT)
    assert ask(reward, call).values == ask(reward, call).values == [1, len(CHAT[0]["content"])]


def test_a_function_without_kwargs_gets_what_it_names() -> None:
    def reward(completions: list[str], answer: list[str], strength: float = 1.0) -> list[float]:
        return [strength * (c == a) for c, a in zip(completions, answer, strict=True)]

    columns = {"answer": "a", "other": 1}
    assert ask(reward, call_of(["a", "b"], columns), strength=3.0).values == [3.0, 0.0]
    answer = ask(reward, call_of(["a"], {"other": 1}))
    assert "needs 'answer'" in answer.problems[0]["message"]
    answer = ask(reward, call_of(["a"], columns), other=3)
    assert "options.other is also a column" in answer.problems[0]["message"]


def test_an_async_function_keeps_its_event_loop() -> None:
    loops = []

    async def reward(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    with asyncio.Runner() as runner:
        for _ in range(2):
            call = call_of(["a", "bcd"])
            assert answer_call(reward, [call], options={}, runner=runner).values == [1, 3]
    assert loops[0] is loops[1]


def test_logged_metrics_and_columns_come_back() -> None:
    def reward(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("agreement", np.float32(0.5))
        log_metric("agreement", 1)
        log_extra("first", [text[:1] or None for text in completions])
        return [0.0] * len(completions)

    answer = ask(reward, call_of(["abc", ""]))
    assert answer.metrics == {"agreement": [0.5, 1.0]}
    assert answer.extras == {"first": ["a", None]}

    def careless(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("first", [1])
        return [0.0] * len(completions)

    assert "1 values for 2 samples" in ask(careless, call_of(["a", "b"])).problems[0]["message"]


class Box:
    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


NUMBERS = [True, 3, 0.25, np.float32(0.5), np.int64(7), np.bool_(True), np.array(2.0)]


@pytest.mark.parametrize("value", [*NUMBERS, Decimal("0.5"), Fraction(1, 4), Box(1.5)], ids=kind_of)
def test_all_that_is_a_number_counts(value: Any) -> None:
    answer = ask(lambda **_: [value], call_of(["a"]))
    assert answer.values == [float(value)]
    assert not answer.problems


@pytest.mark.parametrize(
    "result", [[1.0, 2.0], (1, 2), np.array([1, 2]), iter([1, 2]), {1: 0, 2: 0}.keys()], ids=kind_of
)
def test_any_iterable_is_a_list(result: Any) -> None:
    assert ask(lambda **_: result, call_of(["a", "b"])).values == [1, 2]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "none"),
        (ValueError("this one"), "exception"),
        (TimeoutError("too late"), "timeout"),
        (math.nan, "not_finite"),
        (-math.inf, "not_finite"),
        (np.float32("nan"), "not_finite"),
        (1e39, "not_finite"),
        (10**400, "not_finite"),
        ("1.0", "wrong_type"),
        (b"1", "wrong_type"),
        ([1.0], "wrong_type"),
        (1j, "wrong_type"),
    ],
)
def test_what_is_no_number_costs_only_its_own_sample(value: Any, kind: str) -> None:
    answer = ask(lambda **_: [1.0, value, 2.0, value], call_of(["a", "b", "c", "d"]))
    assert answer.values == [1.0, None, 2.0, None]
    assert kinds(answer) == {ProblemKind(kind): [1, 3]}


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        ([1.0], "wrong_length"),
        ([1.0] * 3, "wrong_length"),
        (np.zeros(10**6), "wrong_length"),
        (iter(int, 1), "wrong_length"),
        ([], "wrong_length"),
        (None, "wrong_type"),
        (1.0, "wrong_type"),
        ("ab", "wrong_type"),
        ({"a": 1, "b": 2}, "wrong_type"),
        ({1.0, 2.0}, "wrong_type"),
        (frozenset([1.0, 2.0]), "wrong_type"),
        (bytearray(b"ab"), "wrong_type"),
    ],
    ids=kind_of,
)
def test_an_answer_of_the_wrong_shape_counts_for_no_sample(result: Any, kind: str) -> None:
    answer = ask(lambda **_: result, call_of(["a", "b"]))
    assert answer.values == [None, None]
    assert kinds(answer) == {ProblemKind(kind): [0, 1]}


@pytest.mark.parametrize(
    "error", [KeyError("k"), SystemExit(3), KeyboardInterrupt(), MemoryError()]
)
def test_whatever_is_raised_is_an_answer(error: BaseException) -> None:
    def reward(**keywords: Any) -> list[float]:
        raise error

    answer = ask(reward, call_of(["a", "b"]))
    assert answer.values == [None, None]
    assert kinds(answer) == {ProblemKind.EXCEPTION: [0, 1]}
    assert type(error).__name__ in answer.problems[0]["message"]
    # Only the user's own lines are shown.
    assert "in reward" in answer.problems[0]["traceback"]
    assert "calls.py" not in answer.problems[0]["traceback"]


def test_functions_load_from_files_and_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sibling_of_mine.py").write_text("VALUE = 2.0")
    code = "from sibling_of_mine import VALUE\ndef f(completions): return [VALUE]\nG = 3"
    (tmp_path / "my_rewards.py").write_text(code)
    for path in ("my_rewards.py:f", f"{tmp_path}/my_rewards.py:f", "my_rewards:f"):
        assert ask(load_reward("function", {"path": path}), call_of(["x"])).values == [2.0]
    for path, message in [
        ("my_rewards.py:missing", "no function 'missing'"),
        ("my_rewards:G", "no function 'G'"),
        ("nowhere.py:f", "there is no file"),
        ("no_such_module.inner:f", "there is no module 'no_such_module.inner'"),
    ]:
        with pytest.raises(RewardError, match=message):
            load_reward("function", {"path": path})


def test_a_package_that_a_users_module_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_much.py").write_text("import no_such_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_reward("function", {"path": "needs_much:f"})


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([{"type": "regex_format", "pattern": "(a"}], "not a regular expression"),
        ([{"type": "exact_match", "extract": "["}], "not a regular expression"),
        ([{"type": "length", "free_tokens": 8, "max_tokens": 8}], "must be above free_tokens"),
        ([{"type": "exact_match"}, {"type": "exact_match"}], "two rewards are named"),
        ([{"type": "function", "path": "a:f", "options": {"prompts": 1}}], "already gets"),
    ],
)
def test_rewards_that_cannot_work_are_refused(
    functions: list[dict[str, Any]], message: str
) -> None:
    raw = {
        "name": "x",
        "model": {"path": "somewhere"},
        "data": {"train": [{"type": "text", "path": "rows.jsonl"}]},
        "rewards": {"functions": functions},
    }
    with pytest.raises(ConfigError, match=message):
        build_config(raw, [], file=None)


@pytest.mark.parametrize(
    ("type", "settings"),
    [("math_verify", {"column": "answer"}), ("reasoning_gym", {"extract": None})],
)
def test_a_missing_package_comes_with_the_command_that_installs_it(
    type: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, type, None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'homeostat\[tasks\]'"):
        load_reward(type, settings)


def test_a_missing_column_is_named_with_the_columns_of_the_row_only() -> None:
    score = functions.exact_match(column="answer", extract=None, ignore_case=False)
    with pytest.raises(RewardError, match=r"no column 'answer' \(it has: reply\)"):
        score(["2"], prompts=["1+1"], log_extra=print, trainer_state=None, reply=["2"])
