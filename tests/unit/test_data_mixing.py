"""Sources by weight: exact shares, schedules, own epochs, the same after a resume."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import tiny, tiny_rl

from homeostat.config.curriculum import WeightSchedule, as_label, weight_at
from homeostat.config.data import DataConfig
from homeostat.data.mixing import Allotment, EpochOrder, MixedRows, Mixture, source_shares
from homeostat.errors import ConfigError
from homeostat.observe.names import describe


def schedule(between: str, *points: tuple[int, float]) -> WeightSchedule:
    listed = [{"step": step, "weight": weight} for step, weight in points]
    raw = json.dumps({"points": listed, "between": between})
    return WeightSchedule.model_validate_json(raw)


def mixture(*weights: float | WeightSchedule) -> Mixture:
    return Mixture([f"s{n}" for n in range(len(weights))], weights)


def mixed(weights: list[float], sizes: list[int], *, rows_per_step: int = 8) -> MixedRows:
    ends = np.cumsum([0, *sizes])
    orders = [
        EpochOrder(np.arange(low, high), key=(3, 2, n), shuffle=True)
        for n, (low, high) in enumerate(pairwise(ends))
    ]
    return MixedRows(orders, mixture(*weights), rows_per_step=rows_per_step)


@given(
    weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=5),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=30),
)
def test_the_rows_of_any_number_of_steps_are_those_that_the_weights_ask_for(weights, counts):
    allotment = Allotment(mixture(*weights))
    parts = [allotment.split(count, step=step) for step, count in enumerate(counts, 1)]
    assert [sum(part) for part in parts] == counts
    given_out = np.sum(parts, axis=0)
    wanted = sum(counts) * np.array(weights) / sum(weights)
    assert np.abs(given_out - wanted).max() < len(weights)


def test_shares_lie_far_inside_what_chance_would_allow():
    allotment = Allotment(mixture(0.7, 0.2, 0.1))
    total = np.sum([allotment.split(32, step=step) for step in range(1, 201)], axis=0)
    shares, num = np.array([0.7, 0.2, 0.1]), 32 * 200
    three_sigma = 3 * np.sqrt(num * shares * (1 - shares))
    assert (np.abs(total - num * shares) <= np.minimum(1.0, three_sigma)).all()


@pytest.mark.parametrize(
    ("between", "expected"),
    [("linear", [1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]), ("hold", [1.0] * 6 + [0.0, 0.0])],
)
def test_a_schedule_holds_its_ends_and_connects_its_points(between, expected):
    falling = schedule(between, (3, 1.0), (7, 0.0))
    assert [falling.at(step) for step in range(1, 9)] == expected
    assert weight_at(2.5, 4) == 2.5


def test_a_source_whose_weight_has_ended_gives_no_more_rows():
    allotment = Allotment(mixture(1.0, schedule("linear", (1, 1.0), (5, 0.0))))
    counts = [allotment.split(7, step=step)[1] for step in range(1, 21)]
    assert counts[0] > 0
    assert counts[4:] == [0] * 16


def test_a_source_comes_epoch_by_epoch_at_its_own_pace():
    rows = mixed([3.0, 1.0], [20, 10])
    steps = [rows.rows(step) for step in range(1, 41)]
    assert all(len(step) == 8 for step in steps)
    taken = [row for step in steps for row in step]
    of_first = [row for row in taken if row < 20]
    of_second = [row for row in taken if row >= 20]
    assert (len(of_first), len(of_second)) == (240, 80)
    for size, found in ((20, of_first), (10, of_second)):
        epochs = [found[start : start + size] for start in range(0, len(found), size)]
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_a_step_is_a_function_of_its_number():
    whole = mixed([1.0, 2.0, 0.5], [9, 30, 4])
    expected = [whole.rows(step) for step in range(1, 31)]
    late = mixed([1.0, 2.0, 0.5], [9, 30, 4])
    assert [late.rows(step) for step in (30, 3, 17)] == [expected[n - 1] for n in (30, 3, 17)]


@given(text=st.text(max_size=80))
def test_whatever_names_a_source_or_a_reason_gives_a_metric(text):
    for prefix in ("data/share", "filter"):
        assert describe(f"{prefix}/{as_label(text)}") is not None
    assert as_label(as_label(text)) == as_label(text)


def test_a_name_that_metrics_know_stays_as_it_is():
    assert as_label("too_long") == "too_long"
    assert as_label("reward 0.5 / all") == "reward_0.5_all"
    assert as_label("/ ") == "unnamed"


def test_sources_of_one_file_name_are_told_apart():
    paths = ("a/rows.jsonl", "b/rows.jsonl", "c/my rows.jsonl")
    raw = [{"type": "text", "path": path} for path in paths]
    data = DataConfig.model_validate_json(json.dumps({"train": raw}))
    assert data.source_names == ("rows", "rows_2", "my_rows")
    assert source_shares(np.array([0, 2, 2, 2]), data.source_names) == {
        "data/share/rows": 0.25,
        "data/share/rows_2": 0.0,
        "data/share/my_rows": 0.75,
    }
    assert source_shares(np.array([0, 0]), data.source_names[:1]) == {}


def sources(*weights: Any) -> dict[str, Any]:
    made = [{"type": "text", "path": f"{n}.jsonl"} for n in range(len(weights))]
    return {
        "train": [one if w is None else {**one, "weight": w} for one, w in zip(made, weights)]  # noqa: B905
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (sources(1.0, None), r"data\.train\.1\.weight: other sources have a weight"),
        (sources(-1.0, 1.0), r"data\.train\.0.*weight"),
        (sources(0.0, 0.0), "all sources are 0 at step 1"),
        (
            sources(*[{"points": [{"step": 1, "weight": 1.0}, {"step": 4, "weight": 0.0}]}] * 2),
            "all sources are 0 at step 4",
        ),
        (
            sources(1.0, {"points": [{"step": 3, "weight": 1.0}, {"step": 3, "weight": 0.0}]}),
            "in the order of steps",
        ),
        (
            sources(1.0, {"points": [{"step": 1, "weight": 1.0}, {"step": 7, "weight": 0.0}]}),
            r"data\.train\.1\.weight\.points: step 7 comes after the last step of the run \(6\)",
        ),
        ({"train": [{"type": "text", "path": "a", "name": "x"}] * 2}, "2 sources are named 'x'"),
        (
            {**sources(None), "validation": [{"type": "text", "path": "a", "weight": 1.0}]},
            r"data\.validation\.0\.weight: this key is for sources of training rows",
        ),
    ],
)
def test_weights_that_cannot_work_are_refused_with_the_reason(tmp_path: Path, data, message):
    with pytest.raises(ConfigError, match=message):
        tiny.config(tmp_path, data=data)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"max_rounds": 4}, "without filters every group is kept"),
        ({"solved_by": "exact_match"}, "only rollout.curriculum and the filter all_failed"),
        ({"curriculum": {}}, "a curriculum needs"),
        (
            {"curriculum": {"replay": {}}, "solved_by": "judge"},
            "no reward that is trained on is called 'judge'",
        ),
        ({"filters": [{"type": "reward_mean"}]}, "would keep every group"),
        ({"filters": [{"type": "reward_mean", "low": 1.0, "high": 0.0}]}, "would keep no group"),
        ({"filters": [{"type": "function", "path": "f.py:f"}] * 2}, "calls the same function"),
        (
            {"filters": [{"type": "function", "path": "f.py:f", "options": {"rewards": 1}}]},
            "every filter already gets an argument rewards",
        ),
    ],
)
def test_filters_and_curricula_that_cannot_work_are_refused(tmp_path: Path, rollout, message):
    with pytest.raises(ConfigError, match=message):
        tiny_rl.config(tmp_path, rollout=rollout)


def test_dynamic_sampling_is_the_filter_zero_spread(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"algorithm\.dynamic_sampling is the same filter"):
        tiny_rl.config(
            tmp_path, algorithm={"type": "dapo"}, rollout={"filters": [{"type": "zero_spread"}]}
        )


def test_what_is_solved_must_be_clear(tmp_path: Path):
    rewards = {"functions": [{"type": "length", "free_tokens": 1, "max_tokens": 2},
                             {"type": "regex_format", "pattern": "a"}]}  # fmt: skip
    with pytest.raises(ConfigError, match="several rewards could decide"):
        tiny_rl.config(tmp_path, rewards=rewards, rollout={"filters": [{"type": "all_failed"}]})
