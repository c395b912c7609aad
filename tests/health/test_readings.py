"""Readings that several rules share, against what they should say."""

from __future__ import annotations

import numpy as np
import pytest

from homeostat.health.rules.readings import rank_correlation
from homeostat.health.view import Series


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
