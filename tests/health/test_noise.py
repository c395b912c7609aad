"""The noise model finds the scatter and correlation of known noises, and rules heed it."""

from __future__ import annotations

import numpy as np
import pytest

from homeostat.arrays import FloatArray64
from homeostat.health.diagnose import judge
from homeostat.health.registry import BY_CODE
from homeostat.health.series.noise import are_unusual, between_neighbours, noise_of
from homeostat.health.view import Kind, RunView, Series

# Runs over which medians are taken: one draw of a noise tells little.
RUNS = 30


def white(seed: int, count: int) -> FloatArray64:
    return np.random.default_rng(seed).normal(size=count)


def correlated(seed: int, count: int, correlation: float) -> FloatArray64:
    """Return records of which each resembles the one before; their deviation is 1."""
    shocks = white(seed, count) * (1.0 - correlation**2) ** 0.5
    shocks[0] /= (1.0 - correlation**2) ** 0.5
    values = np.empty(count)
    values[0] = shocks[0]
    for at in range(1, count):
        values[at] = correlation * values[at - 1] + shocks[at]
    return values


def running_mean(seed: int, count: int, window: int) -> FloatArray64:
    """Return means over the last records, as trainers log them; their deviation is 1."""
    shocks = white(seed, count + window)
    return np.convolve(shocks, np.ones(window), "valid")[:count] / window**0.5


def typical(values: list[float]) -> float:
    return float(np.median(values))


@pytest.mark.parametrize("count", [200, 800])
def test_white_noise_has_its_deviation_and_no_correlation(count: int) -> None:
    found = [noise_of(white(seed, count)) for seed in range(RUNS)]
    assert typical([one.scatter for one in found]) == pytest.approx(1.0, rel=0.1)
    assert typical([one.correlation for one in found]) < 0.1
    assert typical([one.of_mean(50) for one in found]) == pytest.approx(50**-0.5, rel=0.2)


def test_a_fall_is_no_noise() -> None:
    fall = 30.0 * np.exp(-np.arange(400) / 80.0)
    found = [noise_of(white(seed, 400) + fall).scatter for seed in range(RUNS)]
    assert typical(found) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("correlation", [0.6, 0.9])
def test_correlated_noise_is_found_where_neighbours_hide_it(correlation: float) -> None:
    draws = [correlated(seed, 4000, correlation) for seed in range(RUNS)]
    found = [noise_of(values) for values in draws]
    assert typical([one.scatter for one in found]) == pytest.approx(1.0, rel=0.15)
    assert typical([one.correlation for one in found]) == pytest.approx(correlation, abs=0.05)
    means = np.std([values[:1000].mean() for values in draws])
    assert typical([one.of_mean(1000) for one in found]) == pytest.approx(means, rel=0.35)
    hidden = (1.0 - correlation) ** 0.5
    assert typical([between_neighbours(v) for v in draws]) == pytest.approx(hidden, rel=0.1)


@pytest.mark.parametrize(("count", "window"), [(800, 20), (4000, 100)])
def test_a_running_mean_has_more_noise_than_its_neighbours_show(count: int, window: int) -> None:
    draws = [running_mean(seed, count, window) for seed in range(RUNS)]
    assert typical([between_neighbours(values) for values in draws]) < 0.3
    assert 0.7 < typical([noise_of(values).scatter for values in draws]) < 2.0


def test_rare_large_deviations_count_for_means_only() -> None:
    draws = [np.random.default_rng(seed).standard_t(2.5, size=800) for seed in range(RUNS)]
    found = [noise_of(values) for values in draws]
    assert typical([one.deviation / one.scatter for one in found]) > 1.1
    means = np.std([values[:200].mean() for values in draws])
    assert typical([one.of_mean(200) for one in found]) == pytest.approx(means, rel=0.4)


def test_rounding_is_noise() -> None:
    coarse = noise_of(np.round(0.2 * white(1, 400)))
    assert coarse.scatter == pytest.approx(12**-0.5)
    fine = np.full(400, 0.12)
    assert noise_of(fine).scatter == pytest.approx(0.01 * 12**-0.5)
    assert noise_of(fine + 0.003456).scatter == 0.0


def test_constant_and_few_values_have_no_correlation() -> None:
    assert noise_of(np.full(100, 0.123456)).scatter == 0.0
    assert noise_of(white(1, 10)).correlation == 0.0
    assert noise_of(np.zeros(0)).of_mean(1) >= 0.0


def test_a_norm_of_a_wide_distribution_has_no_spikes() -> None:
    wide, narrow = np.exp(1.2 * white(2, 900)), np.exp(0.3 * white(2, 900))
    narrow[400] = 40.0
    assert not are_unusual(wide, np.ones(900), 4.0).any()
    assert np.flatnonzero(are_unusual(narrow, np.ones(900), 4.0)).tolist() == [400]


def test_a_loss_that_wanders_has_not_diverged() -> None:
    course = 1.2 + np.exp(-np.arange(800) / 130.0)
    alarms, found = 0, 0
    for seed in range(RUNS):
        wandering = course * (1.0 + 0.15 * running_mean(seed, 800, 20))
        alarms += bool(_judged("LRN002", "train/loss", wandering, Kind.SFT))
        # The same noise does not hide a loss that rises fourfold.
        risen = wandering * np.where(np.arange(800) > 500, 4.0, 1.0)
        found += bool(_judged("LRN002", "train/loss", risen, Kind.SFT))
    # By the differences of neighbours alone, half of them are alarms.
    assert alarms <= 2
    assert found == RUNS


def test_a_reward_that_wanders_has_not_collapsed() -> None:
    course = -50.0 - 150.0 * np.exp(-np.arange(800) / 260.0)
    alarms, found = 0, 0
    for seed in range(RUNS):
        wandering = course + 25.0 * running_mean(seed, 800, 50)
        alarms += bool(_judged("RWD006", "reward", wandering, Kind.RL))
        lost = wandering - np.where(np.arange(800) > 600, 200.0, 0.0)
        found += bool(_judged("RWD006", "reward", lost, Kind.RL))
    # By the differences of neighbours alone, half of them are alarms.
    assert alarms <= 2
    assert found == RUNS


def _judged(code: str, name: str, values: FloatArray64, kind: Kind) -> object:
    steps = np.arange(1, len(values) + 1)
    return judge(BY_CODE[code], RunView(metrics={name: Series(steps, values)}, kind=kind))
