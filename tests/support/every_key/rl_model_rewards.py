"""Cases of the rewards that ask a model: a classifier, and a judge on the loopback interface.

A key that the reward alone reads is shown by asking it, in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import judge_server as served
from tests.support.classifiers import write_classifier
from tests.support.every_key.rl_rewards import FUNCTIONS, given, label
from tests.support.every_key.rl_workshop import SAMPLED_ONLY, samples
from tests.support.every_key.workshop import Case, Workshop
from tests.support.judge_server import JudgeServer, judge_server

from homeostat.config.model_rewards import ClassifierReward, JudgeReward
from homeostat.config.rewards import RewardsConfig
from homeostat.errors import RewardError
from homeostat.rewards.combine import RewardMoments, finish, totals
from homeostat.rewards.crews import crews_of
from homeostat.rewards.functions import load_reward
from homeostat.rewards.groups import ScoredGroup
from homeostat.rewards.workers import RewardWorkers

ASKED = {"prompts": ["q: ", "q: "], "completions": ["1", "22"]}


def beside(kind: str, settings: str) -> tuple[str, ...]:
    other = "{type: length, free_tokens: 1, max_tokens: 9, name: other}"
    return (f"rewards.functions=[{{type: {kind}, {settings}}}, {other}]",)


def config_of(workshop: Workshop, *overrides: str) -> RewardsConfig:
    found = workshop.config(*overrides).rewards
    assert found is not None
    return found


SETTINGS = {
    **FUNCTIONS,
    "judge": "url: 'http://127.0.0.1:1/v1', model: m",
    "reward_model": "path: classifier",
}


def a_role_of_eval_is_not_trained_on(workshop: Workshop, kind: str) -> None:
    held_out = ("data.validation_share=0.2", "data.max_length=64")
    scored = ScoredGroup({label(kind): [3.0], "other": [1.0]})
    plain = config_of(workshop, *beside(kind, SETTINGS[kind]))
    assert totals([scored], plain) == [[4.0]]
    gold = config_of(workshop, *beside(kind, f"{SETTINGS[kind]}, role: eval"), *held_out)
    assert totals([ScoredGroup({"other": [1.0]})], gold) == [[1.0]]
    assert [reward.label for reward in gold.gold] == [label(kind)]


def a_name_and_a_weight_count(workshop: Workshop, kind: str) -> None:
    found = config_of(workshop, *beside(kind, f"{SETTINGS[kind]}, name: own, weight: -2.5"))
    assert totals([ScoredGroup({"own": [2.0], "other": [1.0]})], found) == [[-4.0]]


# The classifier.


def classifier(workshop: Workshop, **settings: Any) -> Any:
    """Load the reward in this process, over a model that is written once."""
    folder = workshop.folder / "classifier"
    if not folder.exists():
        write_classifier(folder)
        write_classifier(workshop.folder / "labels", num_labels=3, seed=1)
    raw = {"type": "reward_model", "path": str(folder), **settings}
    keys = {"name", "weight", "type", "role", "normalise", "timeout_s", "load_timeout_s"}
    return load_reward("reward_model", ClassifierReward(**raw).model_dump(exclude=keys))


def a_classifier_scores_a_run(workshop: Workshop) -> None:
    reward = classifier(workshop)
    run = workshop.run(*SAMPLED_ONLY, "rewards.functions=[{type: reward_model, path: classifier}]")
    found = samples(run)
    assert len(set(found.reward_S)) > 1
    assert given(run, "reward_model") == pytest.approx(found.reward_S)
    assert np.isfinite(reward(**ASKED)).all()


def classifier_differs(**change: Any) -> Case:
    def case(workshop: Workshop) -> None:
        plain = classifier(workshop)(**ASKED)
        changes = {k: v if k != "path" else str(workshop.folder / v) for k, v in change.items()}
        assert classifier(workshop, **changes)(**ASKED) != plain

    return case


def an_output_is_chosen(workshop: Workshop) -> None:
    classifier(workshop)
    path = str(workshop.folder / "labels")
    first, last = (classifier(workshop, path=path, output=n)(**ASKED) for n in (0, "LABEL_2"))
    assert first != last


def a_dtype_is_that_of_the_weights(workshop: Workshop) -> None:
    assert str(classifier(workshop, dtype="bfloat16").model.dtype) == "torch.bfloat16"
    assert str(classifier(workshop).model.dtype) == "torch.float32"


def a_device_is_where_it_is_computed(workshop: Workshop) -> None:
    assert classifier(workshop, device="cpu").model.device.type == "cpu"
    with pytest.raises((RuntimeError, AssertionError)):
        # No machine has so many.
        classifier(workshop, device="cuda:999")


def passes_have_as_many_rows(workshop: Workshop) -> None:
    for size, wanted in ((1, [1, 1]), (2, [2])):
        reward, found = classifier(workshop, batch_size=size), []
        reward.pick = lambda logits, pick=reward.pick, found=found: (
            found.append(len(logits)) or pick(logits)
        )
        reward(**ASKED)
        assert found == wanted


def long_texts_fail_or_are_cut(workshop: Workshop) -> None:
    (value, _) = classifier(workshop, max_length=3)(**ASKED)
    assert isinstance(value, RewardError)
    (value, _) = classifier(workshop, max_length=3, overlong="truncate")(**ASKED)
    assert isinstance(value, float)


def scores_are_standardised(workshop: Workshop) -> None:
    classifier(workshop)
    scored = [ScoredGroup({"reward_model": [1.0, 3.0], "other": [0.0, 0.0]})]
    for how, wanted in (("none", [1.0, 3.0]), ("standardise", [-(0.5**0.5), 0.5**0.5])):
        found = config_of(workshop, *beside("reward_model", f"path: c, normalise: {how}"))
        assert finish(scored, found, RewardMoments())[0] == pytest.approx(wanted)


def a_pass_and_loading_have_limits(workshop: Workshop) -> None:
    settings = "path: c, timeout_s: 7, batch_size: 4, load_timeout_s: 99"
    own = crews_of(config_of(workshop, *beside("reward_model", settings)))[1]
    assert own.limit_s(9) == 21.0
    limit = RewardWorkers(own, log_file=None)._setup.load_limit_s
    assert limit == 99.0


# The judge.


def judge(server: JudgeServer, *, cache: Path | None = None, **settings: Any) -> Any:
    fast = {"backoff_s": 0.01, "call_timeout_s": 5.0, "total_timeout_s": 9.0}
    raw = {"type": "judge", "url": server.url, "model": "m", **fast, **settings}
    keys = {"name", "weight", "type", "role", "cache"}
    file = None if cache is None else str(cache)
    return load_reward("judge", {**JudgeReward(**raw).model_dump(exclude=keys), "cache_file": file})


def asked(server: JudgeServer, *completions: str, **settings: Any) -> list[Any]:
    columns = settings.pop("columns", {})
    return judge(server, **settings)(
        prompts=["q"] * len(completions),
        completions=list(completions),
        log_metric=lambda name, value: None,
        log_extra=lambda name, values: None,
        **columns,
    )


def a_judge_scores_a_run(workshop: Workshop) -> None:
    secret = "plainwordthatnobodyguesses"
    with (
        judge_server(answer=lambda body: "Score: 4") as server,
        pytest.MonkeyPatch.context() as env,
    ):
        env.setenv("OWN_JUDGE", secret)
        function = f"{{type: judge, url: '{server.url}', model: m, api_key_env: OWN_JUDGE}}"
        run = workshop.again(*SAMPLED_ONLY, f"rewards.functions=[{function}]")
        assert list(samples(run).reward_S) == pytest.approx([3 / 9] * len(samples(run).reward_S))
        calls, cached = (run.metric(f"judge/{name}")[0] for name in ("calls", "cached"))
        assert (calls, calls + cached) == (len(server.bodies), len(samples(run).reward_S))
        assert server.headers[0]["Authorization"] == f"Bearer {secret}"
    assert (run.dir / "judge" / "judge.jsonl").is_file()
    written = [file for file in run.dir.rglob("*") if file.is_file()]
    assert not [file for file in written if secret.encode() in file.read_bytes()]


def it_is_sent(wanted: Callable[[dict[str, Any], dict[str, str]], Any], **settings: Any) -> Case:
    """Show the change in what the endpoint is sent."""

    def case(workshop: Workshop) -> None:
        with judge_server() as server:
            columns = {"answer": ["A"], "truth": ["T"]}
            asked(server, "c", columns=columns)
            asked(server, "c", columns=columns, **settings)
        seen = [wanted(b, h) for b, h in zip(server.bodies, server.headers, strict=True)]
        assert seen[0] != seen[1]
        assert seen[1]

    return case


def text(body: dict[str, Any], headers: dict[str, str]) -> str:
    return str(body["messages"])


def a_url_is_where_it_asks(workshop: Workshop) -> None:
    with judge_server() as server:
        assert asked(server, "c") == [pytest.approx(6 / 9)]
        asked(server, "d", url=f"{server.url}/deeper/")
    assert [body["path"] for body in server.bodies] == [
        "/v1/chat/completions",
        "/v1/deeper/chat/completions",
    ]


def a_key_is_sent(workshop: Workshop) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OWN_JUDGE", "abc")
        it_is_sent(lambda b, h: h.get("Authorization"), api_key_env="OWN_JUDGE")(workshop)


def a_column_is_the_reference(workshop: Workshop) -> None:
    shown = {"prompt": "{completion} {reference}"}
    with judge_server() as server:
        columns = {"answer": ["A"], "truth": ["T"]}
        asked(server, "c", columns=columns, **shown)
        asked(server, "c", columns=columns, reference_column="truth", **shown)
    assert [body["messages"][0]["content"] for body in server.bodies] == ["c A", "c T"]


def scores_are_read(workshop: Workshop) -> None:
    with judge_server(answer=lambda body: 'Score: 4 {"score": 7, "mark": 10}') as server:
        reads = [
            {"type": "regex"},
            {"type": "regex", "pattern": "mark.*?([0-9]+)"},
            {"type": "json"},
            {"type": "json", "field": "mark"},
        ]
        found = [asked(server, "c", read=read)[0] for read in reads]
    assert found == pytest.approx([6 / 9, 1.0, 6 / 9, 1.0])


def a_scale_has_two_ends(workshop: Workshop) -> None:
    with judge_server() as server:
        assert asked(server, "c", lowest=0.0) == [pytest.approx(0.7)]
        assert asked(server, "c", highest=13.0) == [pytest.approx(0.5)]


def calls_have_limits(workshop: Workshop) -> None:
    def slow(body: dict[str, Any]) -> str:
        time.sleep(0.15)
        return "Score: 7"

    with judge_server(answer=slow) as server:
        asked(server, *"abcdef", concurrency=2)
        assert server.most_running == 2
        failed = asked(server, "z", call_timeout_s=0.03, max_retries=1)
        assert "after 2 attempts" in str(failed[0])
        failed = asked(server, "y", call_timeout_s=0.03, total_timeout_s=0.1, max_retries=99)
        assert "total_timeout_s = 0.1" in str(failed[0])


def a_wait_comes_before_a_retry(workshop: Workshop) -> None:
    for backoff_s in (0.01, 0.3):
        with judge_server(acts=[served.status(500)]) as server:
            started = time.monotonic()
            assert asked(server, "c", backoff_s=backoff_s) == [pytest.approx(6 / 9)]
            assert (time.monotonic() - started > 0.14) == (backoff_s > 0.1)


def answers_are_kept(workshop: Workshop) -> None:
    file = workshop.folder / "kept" / "judge.jsonl"
    with judge_server() as server:
        for _ in range(2):
            asked(server, "c", cache=file)
        assert len(server.bodies) == 1
        function = f"{{type: judge, url: '{server.url}', model: m, cache: false}}"
        run = workshop.again(*SAMPLED_ONLY, f"rewards.functions=[{function}]")
        assert not (run.dir / "judge").exists()


CASES: dict[str, Case] = {
    **{
        f"rewards.functions[].role ({kind})": partial(a_role_of_eval_is_not_trained_on, kind=kind)
        for kind in SETTINGS
    },
    **{
        f"rewards.functions[].{key} ({kind})": partial(a_name_and_a_weight_count, kind=kind)
        for key in ("name", "weight")
        for kind in ("judge", "reward_model")
    },
    "rewards.functions[].type (reward_model)": a_classifier_scores_a_run,
    "rewards.functions[].path (reward_model)": an_output_is_chosen,
    "rewards.functions[].output (reward_model)": an_output_is_chosen,
    "rewards.functions[].score (reward_model)": classifier_differs(score="probability"),
    "rewards.functions[].format (reward_model)": classifier_differs(format="pair"),
    "rewards.functions[].normalise (reward_model)": scores_are_standardised,
    "rewards.functions[].device (reward_model)": a_device_is_where_it_is_computed,
    "rewards.functions[].dtype (reward_model)": a_dtype_is_that_of_the_weights,
    "rewards.functions[].batch_size (reward_model)": passes_have_as_many_rows,
    "rewards.functions[].max_length (reward_model)": long_texts_fail_or_are_cut,
    "rewards.functions[].overlong (reward_model)": long_texts_fail_or_are_cut,
    "rewards.functions[].timeout_s (reward_model)": a_pass_and_loading_have_limits,
    "rewards.functions[].load_timeout_s (reward_model)": a_pass_and_loading_have_limits,
    "rewards.functions[].type (judge)": a_judge_scores_a_run,
    "rewards.functions[].url (judge)": a_url_is_where_it_asks,
    "rewards.functions[].model (judge)": it_is_sent(lambda b, h: b["model"], model="n"),
    "rewards.functions[].api_key_env (judge)": a_key_is_sent,
    "rewards.functions[].system (judge)": it_is_sent(text, system="Be strict."),
    "rewards.functions[].prompt (judge)": it_is_sent(text, prompt="Rate {completion}"),
    "rewards.functions[].rubric (judge)": it_is_sent(text, rubric="Short is good."),
    "rewards.functions[].reference_column (judge)": a_column_is_the_reference,
    "rewards.functions[].read.type (regex)": scores_are_read,
    "rewards.functions[].read.pattern (regex)": scores_are_read,
    "rewards.functions[].read.type (json)": scores_are_read,
    "rewards.functions[].read.field (json)": scores_are_read,
    "rewards.functions[].lowest (judge)": a_scale_has_two_ends,
    "rewards.functions[].highest (judge)": a_scale_has_two_ends,
    "rewards.functions[].temperature (judge)": it_is_sent(
        lambda b, h: b["temperature"], temperature=0.5
    ),
    "rewards.functions[].max_tokens (judge)": it_is_sent(
        lambda b, h: b["max_tokens"], max_tokens=9
    ),
    "rewards.functions[].concurrency (judge)": calls_have_limits,
    "rewards.functions[].call_timeout_s (judge)": calls_have_limits,
    "rewards.functions[].total_timeout_s (judge)": calls_have_limits,
    "rewards.functions[].max_retries (judge)": calls_have_limits,
    "rewards.functions[].backoff_s (judge)": a_wait_comes_before_a_retry,
    "rewards.functions[].cache (judge)": answers_are_kept,
}
