"""Blocks: every sequence of operations up to a length, against a plain model of them."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeostat.rollout.native.blocks import BlockPool

ACTS = ("alloc", "fork", "free")


def play(num_blocks: int, moves: list[tuple[str, int]]) -> None:
    """Owners as a counter: what the pool must agree with after every move."""
    pool, owners = BlockPool(num_blocks), Counter()
    for act, pick in moves:
        used = sorted(owners)
        if act == "alloc" and len(used) < num_blocks:
            block = pool.alloc()
            assert block == min(set(range(num_blocks)) - set(used))
            owners[block] = 1
        elif act == "fork" and used:
            block = used[pick % len(used)]
            assert pool.fork(block) == block
            owners[block] += 1
        elif act == "free" and used:
            block = used[pick % len(used)]
            pool.free((block,))
            owners[block] -= 1
            owners = +owners
        assert pool.num_used == len(owners)
        assert pool.num_free == num_blocks - len(owners)
        assert [pool.owners(b) for b in range(num_blocks)] == [owners[b] for b in range(num_blocks)]
        assert pool.extent >= max(owners, default=-1) + 1


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_every_short_history(num_blocks: int) -> None:
    moves = list(product(ACTS, range(2)))
    for history in product(moves, repeat=4):
        play(num_blocks, list(history))


@given(st.integers(0, 6), st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 5))))
def test_any_long_history(num_blocks: int, moves: list[tuple[str, int]]) -> None:
    play(num_blocks, moves)


def test_counts_never_go_below_zero() -> None:
    pool = BlockPool(2)
    block = pool.alloc()
    pool.free((block,))
    for act in (lambda block: pool.free((block,)), pool.fork):
        with pytest.raises(AssertionError, match="free"):
            act(block)
    pool.alloc(), pool.alloc()
    with pytest.raises(AssertionError, match="in use"):
        pool.alloc()
