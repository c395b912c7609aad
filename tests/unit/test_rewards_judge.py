"""A judge over HTTP: what it is asked, how its answers are read, and what it survives."""

from __future__ import annotations

import random
import time
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support import judge_server as served
from tests.support.judge_server import JudgeServer, judge_server
from tests.support.patience import patiently

from homeostat.config.model_rewards import JudgeReward, RegexReading
from homeostat.config.rewards import RewardsConfig
from homeostat.errors import RewardError
from homeostat.rewards import judge_endpoint
from homeostat.rewards.crews import crews_of
from homeostat.rewards.functions import load_reward
from homeostat.rewards.groups import UnscoredGroup
from homeostat.rewards.judge_reading import read_score
from homeostat.rewards.pool import RewardPool
from homeostat.rewards.problems import RewardProblem
from homeostat.rewards.trial import try_rewards
from homeostat.types import Prompt

# Its waits are short, and its limits are those that a busy machine does not reach.
FAST = {"backoff_s": 0.01, "call_timeout_s": 60.0, "total_timeout_s": 120.0}


class Asked:
    """The reward in this process, with what it logs."""

    def __init__(self, server: JudgeServer, cache_file: Path | None = None, **settings: Any):
        raw = {"type": "judge", "url": server.url, "model": "m", **FAST, **settings}
        given = JudgeReward.model_validate(raw).model_dump(
            exclude={"name", "weight", "type", "role", "cache"}
        )
        self.reward = load_reward("judge", {**given, "cache_file": cache_file and str(cache_file)})
        self.metrics: dict[str, float] = {}
        self.answers: list[Any] = []

    def __call__(self, *completions: str, prompts: Any = None, **columns: Any) -> list[Any]:
        return self.reward(
            prompts=prompts or ["q"] * len(completions),
            completions=list(completions),
            log_metric=lambda name, value: self.metrics.__setitem__(name, value),
            log_extra=lambda name, values: self.answers.extend(values),
            **columns,
        )


def test_a_judge_sees_the_texts_and_its_score_is_scaled() -> None:
    texts = {
        "system": "Be strict. {rubric}",
        "prompt": "{prompt}|{completion}|{reference}",
        "rubric": "Short.",
        "reference_column": "truth",
    }
    with judge_server() as server:
        asked = Asked(server, **texts, temperature=0.0, max_tokens=9)
        chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        # Braces in a completion are not a placeholder.
        assert asked("a {prompt} b", prompts=[chat], truth=[42]) == [pytest.approx(6 / 9)]
    (body,) = server.bodies
    assert body["path"] == "/v1/chat/completions"
    assert [message["content"] for message in body["messages"]] == [
        "Be strict. Short.",
        "system: s\n\nuser: u|a {prompt} b|42",
    ]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 9)
    assert asked.answers == ["Score: 7"]


@pytest.mark.parametrize(
    ("answer", "read", "score"),
    [
        ("Score: 3. No, score: **8.5**.", RegexReading().model_dump(), 8.5),
        ("Score: 3. No, score: 8", {"type": "regex", "pattern": r"(?i)score\W*(\d+)"}, 8.0),
        ("I give 4", {"type": "regex", "pattern": r"\d+"}, 4.0),
        ("Nothing", {"type": "regex", "pattern": r"\d+"}, None),
        ('{"score": 1} then ```json\n{"why": "{", "score": "2.5"}```', {"type": "json"}, 2.5),
        ('{"score": true}', {"type": "json"}, None),
        ('{"score": NaN}', {"type": "json"}, None),
        ('{"score": 1', {"type": "json"}, None),
        ('{"mark": {"score": 5}}', {"type": "json"}, None),
    ],
)
def test_a_score_is_read_or_refused(answer: str, read: dict[str, str], score: float | None) -> None:
    read = {"field": "score", **read}
    if score is None:
        with pytest.raises(RewardError, match="no score can be read"):
            read_score(answer, read)
    else:
        assert read_score(answer, read) == score


@pytest.mark.parametrize("answer", ["no number", "Score: 11", "Score: 0", ""])
def test_an_answer_that_cannot_be_used_is_a_failure_and_never_zero(answer: str) -> None:
    with judge_server(answer=lambda body: answer) as server:
        asked = Asked(server)
        (value,) = asked("a")
    assert isinstance(value, RewardError)
    assert (asked.metrics["failed"], asked.metrics["calls"]) == (1, 1)


BAD = {
    "429": served.status(429, Retry_After="0.01"),
    "500": served.status(500),
    "503": served.status(503, Retry_After="0"),
    "garbage": served.garbage,
    "truncated": served.truncated,
    "nested": served.status(200, "[" * 100_000),
    "date": served.status(503, Retry_After=f"Mon, 01 Jan 2029 00:00:00 +{'9' * 19}"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_passing_failure_is_retried(kind: str) -> None:
    with judge_server(acts=[BAD[kind], BAD[kind]]) as server:
        asked = Asked(server)
        assert asked("a") == [pytest.approx(6 / 9)]
    assert (asked.metrics["calls"], asked.metrics["retries"]) == (3, 2)
    assert (asked.metrics["failed"], asked.metrics["cached"]) == (0, 0)
    assert asked.metrics["seconds"] > 0


@pytest.mark.parametrize(("code", "calls"), [(400, 1), (401, 1), (404, 1), (500, 3), (429, 3)])
def test_only_what_may_pass_is_retried_and_not_for_ever(code: int, calls: int) -> None:
    with judge_server(acts=[served.status(code, "because")] * 9) as server:
        (value,) = Asked(server, max_retries=2)("a")
    assert len(server.bodies) == calls
    assert isinstance(value, RewardError)
    assert f"status {code}: because" in str(value)


def test_a_slow_call_and_all_calls_together_have_limits() -> None:
    def check(limit_s: float) -> None:
        limits = {"call_timeout_s": 0.3 * limit_s, "total_timeout_s": limit_s}
        with judge_server(acts=[served.slow(600.0)] * 20) as server:
            asked = Asked(server, max_retries=50, **limits)
            (value,) = asked("a")
        assert isinstance(value, TimeoutError)
        assert f"total_timeout_s = {limit_s:g}" in str(value)
        assert asked.metrics["calls"] >= 2

    patiently(check, limits_s=(0.7, 7.0))


@pytest.mark.parametrize(
    ("start", "again"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nX: ", b"a", id="header"),
        pytest.param(b"", b"HTTP/1.1 100 Continue\r\n\r\n", id="continue"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"a", id="chunk"),
    ],
)
def test_a_reply_whose_head_never_ends_has_the_limit_of_a_call(start: bytes, again: bytes) -> None:
    with judge_server(acts=[served.endless(start=start, again=again)]) as server:
        (value,) = Asked(server, call_timeout_s=0.5, max_retries=0)("a")
    assert isinstance(value, RewardError)
    assert "no answer within 0.5 s" in str(value)


def test_a_server_that_asks_for_patience_beyond_the_limit_is_given_up_at_once() -> None:
    with judge_server(acts=[served.status(429, Retry_After="3600")]) as server:
        (value,) = Asked(server)("a")
    assert isinstance(value, TimeoutError)
    assert len(server.bodies) == 1


def test_a_server_that_is_not_there_is_a_failure() -> None:
    with judge_server() as server:
        pass
    (value,) = Asked(server, max_retries=1)("a")
    assert isinstance(value, RewardError)
    assert "ConnectionRefused" in str(value)


def test_waits_grow_have_jitter_and_honour_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=waits.append)
    monkeypatch.setattr(judge_endpoint, "time", clock)
    monkeypatch.setattr(random, "uniform", lambda low, high: (low + high) / 2)
    date = formatdate(time.time() + 30, usegmt=True)
    acts = [served.status(500)] * 3 + [served.status(429, Retry_After=date)]
    with judge_server(acts=acts) as server:
        asked = Asked(server, backoff_s=2.0, total_timeout_s=500.0)
        assert asked("a") == [pytest.approx(6 / 9)]
    assert waits[:3] == [1.5, 3.0, 6.0]
    assert 25 < waits[3] <= 30


def test_calls_are_limited_in_number_and_no_question_is_asked_twice(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> str:
        time.sleep(0.05)
        return f"Score: {body['messages'][-1]['content'][-1]}"

    settings = {"prompt": "{completion}", "concurrency": 3, "lowest": 0.0}
    file = tmp_path / "judge" / "own.jsonl"
    with judge_server(answer=answer) as server:
        asked = Asked(server, file, **settings)
        values = asked("1", "2", "3", "4", "5", "6", "1")
        assert values == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.1])
        assert (asked.metrics["calls"], asked.metrics["cached"]) == (6, 1)
        assert server.most_running == 3
        # A new process, with a file whose last line a kill has torn.
        file.write_bytes(file.read_bytes()[:-9])
        again = Asked(server, file, **settings)
        assert again("1", "2", "3", "4", "5", "6", "1") == values
        assert (again.metrics["calls"], again.metrics["cached"]) == (1, 6)
        assert Asked(server, file, **settings)("6", "5") == values[5:3:-1]
        assert len(server.bodies) == 7
        # All that enters the answer is part of the key; how it is read is not.
        for change in ({"model": "n"}, {"temperature": 0.5}, {"max_tokens": 3}, {"system": "s"}):
            before = len(server.bodies)
            Asked(server, file, **{**settings, **change})("1")
            assert len(server.bodies) == before + 1
        changed = Asked(server, file, **{**settings, "highest": 20.0})
        assert changed("2") == [pytest.approx(0.1)]
        assert changed.metrics["calls"] == 0


def test_the_key_comes_from_the_environment_and_is_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "plain-word-42")
    acts = [served.status(401, "a" * 93 + "plain-word-42 is wrong" + "b" * 200)]
    with judge_server(acts=acts) as server:
        (value,) = Asked(server, api_key_env="JUDGE_KEY")("a")
        assert server.headers[0]["Authorization"] == "Bearer plain-word-42"
        assert "plain-word-42" not in str(value)
        monkeypatch.setenv("JUDGE_KEY", "two\nlines")
        with pytest.raises(RewardError, match="no HTTP header can have"):
            Asked(server, api_key_env="JUDGE_KEY")
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(RewardError, match="JUDGE_KEY is not set"):
            Asked(server, api_key_env="JUDGE_KEY")


def test_a_row_without_the_reference_that_the_prompt_shows_is_a_failure() -> None:
    with judge_server() as server:
        asked = Asked(server, prompt="{reference} {completion}")
        values = asked("a", "b", answer=["x", None])
    assert values[0] == pytest.approx(6 / 9)
    assert "reference_column: 'answer'" in str(values[1])
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "https://me:pw@host/v1"}, "api_key_env"),
        ({"url": "http://host/v1?key=abc"}, "api_key_env"),
        ({"url": "host:8000"}, "http"),
        ({"prompt": "{answer} {completion}"}, r"\{answer\} is not a placeholder"),
        ({"prompt": "Rate it"}, r"without \{completion\}"),
        ({"rubric": "x", "prompt": "{completion}"}, r"\{rubric\}"),
        ({"reference_column": "x"}, r"\{reference\}"),
        ({"lowest": 5.0, "highest": 5.0}, "highest"),
        ({"total_timeout_s": 1.0}, "total_timeout_s"),
        ({"backoff_s": judge_endpoint.MAX_BACKOFF_S + 1}, "backoff_s"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JudgeReward.model_validate(
            {"type": "judge", "url": "http://h/v1", "model": "m", **settings}
        )


def config(server: JudgeServer, **settings: Any) -> RewardsConfig:
    judge = {"type": "judge", "url": server.url, "model": "m", **FAST, **settings}
    functions = ({"type": "regex_format", "pattern": "a+"}, judge)
    return RewardsConfig.model_validate({"functions": functions})


def test_a_judge_scores_groups_in_its_own_process_and_keeps_answers(tmp_path: Path) -> None:
    problems: list[RewardProblem] = []
    groups = [
        UnscoredGroup(Prompt(n, np.array([1]), f"q{n}", {}), ["a", "b"], [[1], [2]])
        for n in range(3)
    ]
    with judge_server(answer=lambda body: "no" if "q2" in str(body) else "Score: 10") as server:
        for calls in (6, 0):
            rewards = config(server)
            with RewardPool(rewards, on_problem=problems.append, cache=tmp_path) as pool:
                found = pool.score(groups, step=1, total_steps=1)
            assert [group.values["judge"] for group in found[:2]] == [[1.0, 1.0]] * 2
            assert [group.values["regex_format"] for group in found] == [[1.0, 0.0]] * 3
            assert found[2].failed["judge"] == {0, 1}
            assert found[2].extras["judge/answer"] == ["no", "no"]
            counted = [group.metrics.get("judge/calls", [0.0]) for group in found]
            assert sum(one[0] for one in counted) == calls
    assert {problem.prompt_id for problem in problems} == {2}
    assert len((tmp_path / "judge.jsonl").read_text().splitlines()) == 6


def test_check_asks_once_and_says_what_came_back() -> None:
    prompts = [Prompt(n, np.array([1]), "q", {"answer": "x"}) for n in range(3)]
    acts = [served.status(500)]
    with judge_server(acts=acts, answer=lambda body: "Fine. Score: 10") as server:
        line = try_rewards(config(server), prompts, encode=lambda text: [1])[1]
        assert (line.level, line.facts["calls"], len(server.bodies)) == ("ok", 2, 2)
        assert "'Fine. Score: 10', which is read as 1" in line.text
        server.answer = lambda body: "I would rather not"
        line = try_rewards(config(server), prompts, encode=lambda text: [1])[1]
    assert line.level == "error"
    assert "I would rather not" in line.text


def test_the_limit_of_a_request_covers_all_its_samples() -> None:
    with judge_server() as server:
        rewards = config(server, concurrency=4, call_timeout_s=5.0, total_timeout_s=10.0)
    shared, own = crews_of(rewards)
    assert (shared.limit_s(100), own.limit_s(4), own.limit_s(9)) == (10.0, 12.0, 36.0)
