"""Curves on the dashboard: what is drawn of a long series is what all of its points would show."""

from __future__ import annotations

import numpy as np
import pytest

from homeostat.dashboard.curves import decimated, within
from homeostat.health.view import Series


def series(values: np.ndarray) -> Series:
    return Series(np.arange(1, len(values) + 1), values.astype(np.float64))


@pytest.mark.parametrize("seed", range(4))
def test_no_extreme_is_lost_and_the_order_is_kept(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=rng.integers(2000, 50_000))
    values[rng.integers(len(values))] = 40.0
    values[rng.integers(len(values))] = -40.0
    found = decimated(series(values), max_points=600)
    assert len(found) <= 602
    assert (np.diff(found.steps) > 0).all()
    assert (found.values.min(), found.values.max()) == (values.min(), values.max())
    assert (found.steps[0], found.steps[-1]) == (1, len(values))
    assert (found.values == values[found.steps - 1]).all()


def test_every_part_keeps_its_extremes() -> None:
    values = np.zeros(10_000)
    values[::100] = 1.0
    found = decimated(series(values), max_points=300)
    # A spike every 100 steps, and parts of 100 steps.
    assert np.count_nonzero(found.values) >= 99


def test_a_value_that_is_not_finite_is_never_hidden() -> None:
    values = np.ones(20_000)
    values[12_345], values[17_000] = np.nan, np.inf
    found = decimated(series(values), max_points=90)
    assert np.isnan(found.values).sum() == 1
    assert np.isinf(found.values).sum() == 1
    assert len(decimated(series(np.full(5000, np.nan)), max_points=90)) <= 92


def test_a_short_series_stays_as_it_is() -> None:
    short = series(np.arange(10.0))
    assert decimated(short, max_points=10) is short


def test_a_range_has_a_point_beyond_each_end() -> None:
    found = within(series(np.arange(100.0)), first=10.5, last=20.0)
    assert (found.steps[0], found.steps[-1]) == (10, 21)
    assert len(within(series(np.arange(100.0)), first=None, last=None)) == 100
    assert within(series(np.arange(100.0)), first=500, last=900).steps.tolist() == [100]
