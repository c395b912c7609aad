"""Metrics of the policy cover all rows: some of those left out stand for all of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeostat.run.evaluation.rl_measure import policy_metrics
from homeostat.run.learning.coverage import NUM_MEASURED, num_trained, scaled_up, some_of, together
from homeostat.train.update import Measured
from homeostat.types import TokenRow, UpdateReport


def row(number: int, length: int) -> TokenRow:
    weights = (np.arange(length) >= 1).astype(np.float32) / length
    return TokenRow(number, np.zeros(length, np.int64), weights)


@given(st.lists(st.integers(2, 9), max_size=40))
def test_rows_are_taken_from_the_whole_step(lengths: list[int]) -> None:
    rows = [row(number, length) for number, length in enumerate(lengths)]
    some = some_of(rows)
    numbers = [one.row_id for one in some]
    assert numbers == sorted(set(numbers))
    assert len(some) == min(len(rows), NUM_MEASURED)
    gaps = np.diff([*numbers, len(rows)])
    assert len(rows) <= NUM_MEASURED or gaps.max() <= math.ceil(len(rows) / NUM_MEASURED)
    assert sum(map(num_trained, rows)) == sum(length - 1 for length in lengths)


def stats(tokens: float, entropy: float, ratio: float) -> dict[str, float]:
    names = ("clip_low", "clip_high", "dual_clip", "old_kl")
    found = {"tokens": tokens, "entropy": tokens * entropy, "ratio": tokens * ratio}
    return found | dict.fromkeys(names, 0.0) | {"ratio_max": ratio, "ratio_min_neg": -ratio}


def test_a_mean_is_over_the_tokens_of_all_rows() -> None:
    """30 tokens at entropy 2 were trained; of 70 left out, 10 were looked at, with entropy 0.5."""
    trained = stats(30.0, 2.0, 1.1)
    report = UpdateReport(
        1, True, 0.0, 0.0, 0.0, 1, np.zeros(0, np.int64), np.zeros(0, np.float32), stats=trained
    )
    looked_at = stats(10.0, 0.5, 0.9)
    maxima = {name: looked_at.pop(name) for name in ("ratio_max", "ratio_min_neg")}
    others = scaled_up(Measured(looked_at, maxima), num_tokens=70)
    found = policy_metrics([together(report, others)])
    assert found["entropy"] == pytest.approx(0.3 * 2.0 + 0.7 * 0.5)
    assert found["policy/ratio_mean"] == pytest.approx(0.3 * 1.1 + 0.7 * 0.9)
    assert (found["policy/ratio_max"], found["policy/ratio_min"]) == (1.1, 0.9)
