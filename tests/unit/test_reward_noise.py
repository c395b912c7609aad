"""The share of the rewards' variance that is among equal completions."""

from __future__ import annotations

import random

import pytest

from homeostat.run.evaluation.rl_measure import reward_noise


def group(rng: random.Random, *, sigma: float) -> list[tuple[str, float | None]]:
    texts = [rng.choice("abc") for _ in range(16)]
    return [(text, float(text == "a") + rng.gauss(0.0, sigma)) for text in texts]


def test_a_reward_that_the_completion_decides_has_no_noise() -> None:
    rng = random.Random(1)
    assert reward_noise([group(rng, sigma=0.0) for _ in range(5)]) == 0.0


def test_the_share_is_that_of_the_variances() -> None:
    # A right answer in three has variance 2/9.
    rng = random.Random(2)
    for sigma in (0.3, 1.0):
        expected = sigma**2 / (sigma**2 + 2 / 9)
        found = reward_noise([group(rng, sigma=sigma) for _ in range(400)])
        assert found == pytest.approx(expected, rel=0.05)


def test_nothing_is_said_without_equal_completions_or_without_differences() -> None:
    assert reward_noise([[("a", 1.0), ("b", 0.0)]]) is None
    assert reward_noise([[("a", 1.0), ("a", 1.0), ("b", 1.0)]]) is None
    assert reward_noise([[("a", None), ("a", 1.0), ("b", 0.0)]]) is None
    # Copies alone: there is no other completion to compare with.
    assert reward_noise([[("a", 1.0), ("a", 0.0)]]) is None
