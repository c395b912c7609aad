"""Our medians are those of numpy, except for the sign of a zero."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from homeostat.arrays import FloatArray64
from homeostat.health.series.medians import median, running_medians

VALUES = arrays.arrays(np.float64, st.integers(1, 40), elements=st.floats(width=64))


@given(VALUES)
@example(np.array([-0.0]))
@example(np.array([-0.0, -0.0]))
def test_a_median_is_that_of_numpy(values: FloatArray64) -> None:
    with np.errstate(all="ignore"):
        np.testing.assert_equal(median(values), float(np.median(values)) + 0.0)


@given(VALUES, st.integers(1, 15))
def test_running_medians_are_those_of_numpy(values: FloatArray64, window: int) -> None:
    window = min(window, len(values))
    rows = np.lib.stride_tricks.sliding_window_view(values, window)
    with np.errstate(all="ignore"):
        np.testing.assert_equal(running_medians(values, window), np.median(rows, axis=1) + 0.0)


def test_the_median_of_nothing_is_not_a_number() -> None:
    assert math.isnan(median([]))
    assert median([3, 1]) == 2.0
