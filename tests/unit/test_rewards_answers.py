"""What a reward worker may send, and that whatever else it sends is refused as a whole."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeostat.observe.names import describe
from homeostat.rewards.answers import BadAnswerError, CallAnswer, read_answer, read_load_failures
from homeostat.rewards.calls import MAX_LOGGED_NAMES, Answer, check_logged_name
from homeostat.rewards.problems import ProblemKind
from homeostat.rollout.collect import StepRollouts

PROBLEM = {"kind": "timeout", "message": "late", "samples": [1], "traceback": ""}
NONE = {**PROBLEM, "kind": "none", "samples": [2]}
GOOD: dict[str, Any] = {
    "values": [1.0, None, None],
    "problems": [PROBLEM, NONE],
    "metrics": {"accuracy/easy": [0.5, math.nan]},
    "extras": {"parsed": ["7", 3, None]},
}


def test_a_good_answer_tells_failures_from_none() -> None:
    answer = read_answer(GOOD, num=3)
    assert answer.values == [1.0, None, None]
    assert answer.failed == {1}
    assert [problem.kind for problem in answer.problems] == [ProblemKind.TIMEOUT, ProblemKind.NONE]
    assert answer.extras == {"parsed": ["7", 3, None]}


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


BAD: dict[str, dict[str, Any]] = {
    "no list of values": {"values": {"0": 1.0}},
    "too many values": {"values": [1.0] * 4},
    "a text for a value": {"values": ["1.0", None, None]},
    "a truth for a value": {"values": [True, None, None]},
    "an int for a value": {"values": [1, None, None]},
    "not a number": {"values": [math.nan, None, None]},
    "infinity": {"values": [math.inf, None, None]},
    "beyond float32": {"values": [1e39, None, None]},
    "nested values": {"values": [nested(50), None, None]},
    "problems is a text": {"problems": "none"},
    "a problem is a number": {"problems": [3]},
    "an unknown kind": {"problems": [{**PROBLEM, "kind": "boredom"}, NONE]},
    "a kind that cannot be hashed": {"problems": [{**PROBLEM, "kind": [1]}, NONE]},
    "a sample that is not there": {"problems": [{**PROBLEM, "samples": [3]}, NONE]},
    "a sample from the end": {"problems": [{**PROBLEM, "samples": [-2]}, NONE]},
    "a sample named twice": {"problems": [{**PROBLEM, "samples": [1, 1]}, NONE]},
    "a sample with a value": {"problems": [{**PROBLEM, "samples": [0, 1]}, NONE]},
    "a sample without a reason": {"problems": [PROBLEM]},
    "no samples": {"problems": [PROBLEM, NONE, {**NONE, "samples": []}]},
    "a message of bytes": {"problems": [{**PROBLEM, "message": None}, NONE]},
    "no traceback": {"problems": [{"kind": "timeout", "message": "", "samples": [1]}, NONE]},
    "metrics is a list": {"metrics": [["a", 1.0]]},
    "a metric of a text": {"metrics": {"a": "1.0"}},
    "a metric of texts": {"metrics": {"a": ["1.0"]}},
    "a metric with a bell": {"metrics": {"a\x07": [1.0]}},
    "a metric without a name": {"metrics": {"": [1.0]}},
    "a metric with a long name": {"metrics": {"a" * 10**6: [1.0]}},
    "too many metrics": {"metrics": {f"m{n}": [1.0] for n in range(MAX_LOGGED_NAMES + 1)}},
    "too many values of a metric": {"metrics": {"m": [1.0] * 10**6}},
    "extras is none": {"extras": None},
    "an extra that is too short": {"extras": {"a": ["x"]}},
    "an extra that is a text": {"extras": {"a": "xyz"}},
    "an extra of lists": {"extras": {"a": [[], [], []]}},
    "an extra of huge texts": {"extras": {"a": ["x" * 10**6] * 3}},
    "an extra of huge numbers": {"extras": {"a": [10**400] * 3}},
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_answer_is_refused(what: str) -> None:
    with pytest.raises(BadAnswerError) as refused:
        read_answer(GOOD | BAD[what], num=3)
    assert len(str(refused.value)) < 400
    assert str(refused.value).isprintable()


def test_a_missing_part_is_refused() -> None:
    for name in GOOD:
        with pytest.raises(BadAnswerError):
            read_answer({key: value for key, value in GOOD.items() if key != name}, num=3)


def test_long_messages_are_cut_and_can_be_written() -> None:
    problem = {**PROBLEM, "message": "x" * 10**6 + "\ud800 end", "traceback": "y" * 10**6}
    answer = read_answer(GOOD | {"problems": [problem, NONE]}, num=3)
    assert answer.problems[0].message.endswith("\\ud800 end")
    assert len(answer.problems[0].message) + len(answer.problems[0].traceback) < 6000
    answer.problems[0].message.encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
parts = st.sampled_from([*GOOD, "kind", "samples", "failed"])


@given(st.dictionaries(parts, json_values), st.integers(0, 4))
def test_any_json_is_an_answer_or_refused(changes: dict[str, Any], num: int) -> None:
    message = json.loads(json.dumps(GOOD | changes))
    try:
        answer = read_answer(message, num=num)
    except BadAnswerError:
        return
    assert isinstance(answer, CallAnswer)
    assert len(answer.values) == num
    assert answer.failed <= {n for n, value in enumerate(answer.values) if value is None}
    # What was let in can be written to the journal and the metrics.
    json.dumps([answer.values, answer.metrics, answer.extras])
    assert all(describe(f"rewards/x/logged/{name}") for name in answer.metrics)


@given(json_values)
def test_any_json_is_a_first_message_or_refused(value: Any) -> None:
    for message in ({"failed": value}, {"failed": [value]}, {"other": value}):
        try:
            assert isinstance(read_load_failures(message), list)
        except BadAnswerError:
            continue


@given(st.text(max_size=120))
def test_a_name_that_may_be_logged_is_in_the_catalogue(name: str) -> None:
    try:
        check_logged_name(name)
    except ValueError:
        return
    assert describe(f"rewards/some.reward-1/logged/{name}") is not None


@pytest.mark.parametrize("name", ["accuracy/easy", "solved @ 2 %", "a b", "x", "Größe", "99.9"])
def test_reasonable_names_may_be_logged(name: str) -> None:
    answer = Answer([1.0])
    answer.log_metric(name, 1)
    answer.log_extra(name, ["x"])
    assert read_answer(asdict(answer), num=1).metrics == {name: [1.0]}


@pytest.mark.parametrize("name", ["", " a", "a\n", "\x1b[2J", "a" * 101, "\u202eabc", "\ud800"])
def test_other_names_are_an_error_of_the_function(name: str) -> None:
    answer = Answer([1.0])
    with pytest.raises(ValueError, match="cannot be used"):
        answer.log_metric(name, 1)
    with pytest.raises(ValueError, match="cannot be used"):
        answer.log_extra(name, ["x"])
    assert (answer.metrics, answer.extras) == ({}, {})


def test_a_journal_that_holds_a_name_of_another_kind_is_replayed_without_it() -> None:
    """Earlier versions wrote any name to the journal, and could not be resumed over it."""
    names = ["accuracy/easy", "solved @ 2 %", "bell\x07", "x" * 101]
    logged = {f"rewards/mine/logged/{name}": [2.0, 1.0] for name in names}
    rollouts = StepRollouts()
    rollouts.take_logged([logged, {}])
    rollouts.take_logged([logged])
    kept = {f"rewards/mine/logged/{name}": [6.0, 4] for name in names[:2]}
    assert rollouts.logged == kept


def test_a_function_that_goes_on_after_an_error_in_logging_still_answers() -> None:
    answer = Answer([1.0])
    for number in range(MAX_LOGGED_NAMES + 9):
        try:
            answer.log_metric(f"m{number}", number)
            answer.log_extra(f"m{number}", ["x"] * (1 + number % 2))
        except ValueError:
            continue
    assert len(read_answer(asdict(answer), num=1).metrics) == MAX_LOGGED_NAMES
