"""Sums, running moments and clipping, against numpy in float64."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeostat.config.rewards import RewardsConfig
from homeostat.rewards.combine import RewardMoments, RunningMoments, finish, totals, weighted_sum
from homeostat.rewards.groups import ScoredGroup

Rewards = list[float | None]
reward = st.none() | st.floats(-1e3, 1e3)


def config(**settings: Any) -> RewardsConfig:
    functions = (
        {"type": "exact_match", "name": "right", "weight": 2.0},
        {"type": "regex_format", "name": "form", "pattern": "x", "weight": -0.5},
    )
    return RewardsConfig.model_validate({"functions": functions, **settings})


def scored(right: Rewards, form: Rewards) -> ScoredGroup:
    return ScoredGroup({"right": right, "form": form})


def test_a_reward_without_a_value_is_left_out_of_the_sum() -> None:
    weights = {"right": 2.0, "form": -0.5}
    assert weighted_sum({"right": 1.0, "form": 3.0}, weights) == 0.5
    assert weighted_sum({"right": None, "form": 3.0}, weights) == -1.5
    assert weighted_sum({"right": None, "form": None}, weights) is None


def test_a_reward_that_failed_leaves_no_sum_at_all() -> None:
    weights = {"right": 2.0, "form": -0.5, "watched": 0.0}
    values = {"right": None, "form": 3.0, "watched": None}
    assert weighted_sum(values, weights) == -1.5
    assert weighted_sum(values, weights, failed={"right"}) is None
    assert weighted_sum(values, weights, failed={"right", "watched"}) is None
    # A reward without weight is only watched.
    assert weighted_sum(values, weights, failed={"watched"}) == -1.5


def test_a_failed_sample_enters_neither_sums_nor_moments() -> None:
    group = ScoredGroup({"right": [1.0, None, None], "form": [0.0, 1.0, 1.0]}, {"right": {1}})
    moments = RewardMoments()
    assert finish([group], config(normalise="none"), moments) == [[2.0, None, -0.5]]
    assert (moments.total.count, moments.total.mean) == (2, 0.75)


@given(st.lists(st.lists(st.tuples(reward, reward), max_size=5), max_size=4))
def test_sums_are_a_nansum_per_sample(pairs: list[list[tuple[float | None, float | None]]]) -> None:
    groups = [scored([r for r, _ in group], [f for _, f in group]) for group in pairs]
    found = totals(groups, config())
    for group, values in zip(pairs, found, strict=True):
        table = np.array(group, dtype=float).reshape(len(group), 2) * [2.0, -0.5]
        lost = np.isnan(table).all(axis=1)
        assert [value is None for value in values] == lost.tolist()
        kept = [value for value in values if value is not None]
        np.testing.assert_allclose(kept, np.nansum(table, axis=1)[~lost], rtol=1e-12, atol=1e-9)


batches = st.lists(st.lists(reward, max_size=9), min_size=1, max_size=6)


@given(batches, st.floats(-1e6, 1e6))
def test_moments_are_those_of_all_values_at_once(parts: list[Rewards], shift: float) -> None:
    moments = RunningMoments()
    for part in parts:
        moments.apply([None if r is None else r + shift for r in part], "none")
        # A checkpoint in between changes nothing.
        moments = RunningMoments.from_json(json.loads(json.dumps(moments.as_json())))
    values = np.array([r + shift for part in parts for r in part if r is not None])
    assert moments.count == len(values)
    if len(values):
        assert moments.mean == pytest.approx(values.mean(), rel=1e-12, abs=1e-9)
    expected = values.std(ddof=1) if len(values) > 1 else 0.0
    assert moments.deviation == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_small_spread_on_a_large_mean_survives() -> None:
    values_B = np.random.default_rng().normal(1e7, 1e-3, size=(50, 100))
    moments = RunningMoments()
    for batch in values_B:
        moments.update(batch.tolist())
    assert moments.deviation == pytest.approx(values_B.std(ddof=1), rel=1e-3)


@pytest.mark.parametrize("mode", ["none", "scale", "standardise"])
def test_normalising_uses_all_that_was_seen_with_this_batch(mode: Any) -> None:
    rng = np.random.default_rng()
    first, second = rng.normal(3, 2, size=20), rng.normal(3, 2, size=7)
    moments = RunningMoments()
    moments.apply(first.tolist(), mode)
    found = moments.apply([*second.tolist(), None], mode)
    seen = np.concatenate([first, second])
    mean = seen.mean() if mode == "standardise" else 0.0
    deviation = 1.0 if mode == "none" else seen.std(ddof=1)
    assert found[-1] is None
    np.testing.assert_allclose(found[:-1], (second - mean) / deviation, rtol=1e-12)


@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.0], [0.0, 0.0], [], [None]])
def test_rewards_that_are_all_the_same_are_not_blown_up(rewards: Rewards) -> None:
    scaled = RunningMoments()
    assert scaled.apply(rewards, "scale") == rewards
    assert scaled.apply(rewards, "scale") == rewards
    level = RunningMoments()
    for _ in range(3):
        found = level.apply(rewards, "standardise")
        assert all(abs(value) < 1e-12 for value in found if value is not None)


def test_what_is_trained_on_is_summed_normalised_then_clipped() -> None:
    groups = [scored([1.0, 0.0, None], [0.0, 0.0, None]), scored([5.0], [None])]
    moments = RewardMoments()
    settings = config(normalise="standardise", clip=0.8)
    found = finish(groups, settings, moments)
    sums = np.array([2.0, 0.0, 10.0])
    a, b, c = np.clip((sums - sums.mean()) / sums.std(ddof=1), -0.8, 0.8)
    assert found == [[pytest.approx(a), pytest.approx(b), None], [pytest.approx(c)]]
    assert math.isclose(c, 0.8)
    assert moments.total.count == 3
    assert finish(groups, config(), RewardMoments()) == [[2.0, 0.0, None], [10.0]]


def test_a_reward_is_standardised_by_its_own_values_so_far() -> None:
    """The reward beside it and the normalising of the sum are not touched."""
    functions = (
        {"type": "reward_model", "path": "m", "weight": 3.0, "normalise": "standardise"},
        {"type": "regex_format", "name": "form", "pattern": "x"},
        {"type": "regex_format", "name": "gold", "pattern": "x", "role": "eval"},
    )
    settings = RewardsConfig.model_validate({"functions": functions})
    moments = RewardMoments()
    seen: list[float] = []
    for step in ([[1.0, 5.0], [2.5]], [[-3.0, None, 4.0]]):
        groups = [ScoredGroup({"reward_model": own, "form": [1.0] * len(own)}) for own in step]
        found = finish(groups, settings, moments)
        flat = [value for own in step for value in own if value is not None]
        seen += flat
        mean, deviation = np.mean(seen), np.std(seen, ddof=1)
        expected = [
            [1 if v is None else 3 * (v - mean) / deviation + 1 for v in own] for own in step
        ]
        for got, wanted in zip(found, expected, strict=True):
            assert got == pytest.approx(wanted)
    assert moments.own["reward_model"].count == len(seen)
