"""Packing: every row once, never over the budget, as few bins as can be, evenly filled."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from homeostat.data.packing import fill, group, pack

lengths_and_budgets = st.tuples(
    st.lists(st.integers(1, 120), max_size=60), st.integers(min_value=1, max_value=100)
)


def first_fit(lengths: list[int], max_tokens: int) -> int:
    """Bins that plain first fit needs, written the obvious way."""
    loads: list[int] = []
    for length in lengths:
        for number, load in enumerate(loads):
            if load + length <= max_tokens:
                loads[number] += length
                break
        else:
            loads.append(length)
    return len(loads)


def realistic_lengths(noise: np.random.Generator, num_rows: int) -> np.ndarray:
    """Log-normal with a mean of about 250 tokens, as chat data have."""
    return np.clip(noise.lognormal(5.25, 0.75, num_rows), 8, 4096).astype(int)


@given(lengths_and_budgets)
def test_every_row_once_within_the_budget_and_no_more_bins_than_first_fit(case):
    lengths, max_tokens = case
    bins = pack(lengths, max_tokens)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    for rows in bins:
        assert sum(lengths[row] for row in rows) <= max_tokens or len(rows) == 1
    assert len(bins) <= first_fit(lengths, max_tokens)
    loads = [sum(lengths[row] for row in rows) for rows in bins]
    assert loads == sorted(loads, reverse=True)
    assert bins == pack(np.array(lengths, dtype=np.int64), max_tokens)


def test_realistic_updates_fill_97_percent_of_their_budget():
    """fill = tokens / (bins * max_tokens), over updates of 1024 rows.

    Rounding up to whole bins counts: of 256 rows (16 bins) it alone takes 3 % on average, so
    there the number of bins is compared with the least that could hold the tokens.
    """
    noise = np.random.default_rng()
    tokens, num_bins = 0, 0
    for _ in range(40):
        lengths = realistic_lengths(noise, 256)
        bins = pack(lengths, 4096)
        assert len(bins) <= math.ceil(lengths.sum() / (0.99 * 4096))
        lengths = realistic_lengths(noise, 1024)
        tokens, num_bins = tokens + lengths.sum(), num_bins + len(pack(lengths, 4096))
    assert fill([tokens], num_bins=num_bins, max_tokens=4096) >= 0.97


def test_the_rows_are_spread_evenly_where_they_fit():
    lengths = realistic_lengths(np.random.default_rng(3), 256)
    loads = [lengths[rows].sum() for rows in pack(lengths, 8192)]
    assert max(loads) - min(loads) <= lengths.max()
    assert pack([5, 5, 5, 5], 15) == [[0, 2], [1, 3]]


def test_a_row_over_the_budget_is_alone():
    assert pack([3, 50, 4], 10) == [[1], [0, 2]]


def test_grouping_keeps_the_order():
    assert group([9] * 5, 2) == [[0, 1], [2, 3], [4]]
    assert group([], 2) == []


@given(lengths_and_budgets, st.integers(1, 8))
def test_data_groups_get_bins_in_full_rounds_of_almost_equal_loads(case, num_groups):
    lengths, max_tokens = case
    bins = pack(lengths, max_tokens, multiple_of=num_groups)
    check_rounds(bins, lengths, num_groups, fewest=len(pack(lengths, max_tokens)))
    for rows in bins:
        assert sum(lengths[row] for row in rows) <= max_tokens or len(rows) == 1
    if max(lengths, default=0) <= max_tokens:
        assert idle_tokens(bins, lengths, num_groups) <= (num_groups - 1) * max_tokens


@given(st.lists(st.integers(1, 120), max_size=60), st.integers(1, 7), st.integers(2, 8))
def test_packing_off_gives_full_rounds_of_almost_equal_loads_too(lengths, per_bin, num_groups):
    bins = group(lengths, per_bin, multiple_of=num_groups)
    check_rounds(bins, lengths, num_groups, fewest=math.ceil(len(lengths) / per_bin))
    assert all(len(rows) <= per_bin for rows in bins)
    if len(bins) % num_groups == 0 and lengths:
        assert idle_tokens(bins, lengths, num_groups) <= (num_groups - 1) * max(lengths)


def check_rounds(bins: list[list[int]], lengths: list[int], num_groups: int, *, fewest: int):
    """Every row once, and a count that no rank waits for, unless there are too few rows."""
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(bins)
    assert len(bins) == min(len(lengths), math.ceil(fewest / num_groups) * num_groups)
    loads = [sum(lengths[row] for row in rows) for rows in bins]
    assert loads == sorted(loads, reverse=True)


def idle_tokens(bins: list[list[int]], lengths: list[int], num_groups: int) -> int:
    """Tokens that ranks could have worked on while they waited for the fullest of their round."""
    loads = [sum(lengths[row] for row in rows) for rows in bins]
    rounds = [loads[start : start + num_groups] for start in range(0, len(loads), num_groups)]
    return sum(max(part) * len(part) - sum(part) for part in rounds)


def test_realistic_rounds_leave_ranks_idle_for_less_than_one_percent():
    noise = np.random.default_rng()
    for num_groups in (2, 4, 8):
        idle, tokens = 0, 0
        for _ in range(20):
            lengths = realistic_lengths(noise, 512).tolist()
            bins = pack(lengths, 4096, multiple_of=num_groups)
            assert len(bins) % num_groups == 0
            idle, tokens = idle + idle_tokens(bins, lengths, num_groups), tokens + sum(lengths)
        assert idle < 0.01 * tokens
