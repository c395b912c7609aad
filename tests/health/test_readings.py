"""Readings that several rules share, against what they should say."""

from __future__ import annotations

import numpy as np
import pytest

from homeostat.health.frameworks import HOMEOSTAT
from homeostat.health.rules.readings import is_climbing, is_rounded, rank_correlation
from homeostat.health.view import Kind, RunView, Series


def series(values: list[float]) -> Series:
    return Series(np.arange(len(values)), np.array(values, dtype=np.float64))


def spearman(values: list[float]) -> float:
    """The rank correlation by its definition: equal values have the mean of their places."""
    ranks = [
        sum(other < value for other in values) + 0.5 * sum(other == value for other in values)
        for value in values
    ]
    return float(np.corrcoef(np.arange(len(values)), ranks)[0, 1])


def test_ranks_of_equal_values_are_equal() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        values = [float(value) for value in rng.integers(0, 5, size=15)]
        assert rank_correlation(series(values)) == pytest.approx(spearman(values), abs=1e-12)


def test_a_metric_that_fell_to_its_floor_has_fallen_however_long_it_lies_there() -> None:
    falls = [0.6, 0.4, 0.2]
    assert rank_correlation(series(falls + [0.0] * 30)) < 0.0
    assert rank_correlation(series([-value for value in falls] + [0.0] * 30)) > 0.0


def with_rates(values: list[float]) -> RunView:
    return RunView(metrics={"learning_rate": series(values)}, framework=HOMEOSTAT, kind=Kind.SFT)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([4e-8, 4e-8, 1e-7, 1e-7, 9e-8, 9e-8, 4e-8, 4e-8, 1e-8, 1e-8, 0.0], True),
        # A decay in equal parts has no equal neighbours.
        ([1e-6 * k for k in range(20, 0, -1)], False),
        # Nor has one whose schedule then ends at 0.
        ([4e-7 * k for k in range(40, 0, -1)] + [0.0] * 30, False),
        ([1e-5] * 20, False),
        ([5e-324, 1e300] * 10, False),
        ([1e-300, 2e-300, 2e-300] * 10, False),
        ([0.0] * 20, False),
    ],
)
def test_rounding_is_told_by_the_values(rates: list[float], expected: bool) -> None:
    assert is_rounded(with_rates(rates), "learning_rate", 1e-7) is expected


def test_a_rate_climbs_only_towards_its_highest() -> None:
    assert is_climbing(with_rates([1e-6, 2e-6, 3e-6]))
    assert not is_climbing(with_rates([3e-6, 1e-6, 2e-6]))
    assert not is_climbing(with_rates([float("nan")] * 3))
