"""GAE, the value loss and the measure of a critic, against plain float64 loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from homeostat.algorithms.baselines import CriticValues, RewardBatch
from homeostat.algorithms.catalogue import advantages
from homeostat.algorithms.ppo import earned, explained_variance, gae
from homeostat.algorithms.value import value_loss, value_spec
from homeostat.config.algorithm import AnyAlgorithm
from homeostat.run.learning.updates import epoch_spans


def config_of(**keys):
    return TypeAdapter(AnyAlgorithm).validate_python({"type": "ppo", **keys})


def gae_by_definition(rewards, values, last, gamma, lam) -> list[float]:
    """sum_k (gamma lambda)^k delta_(t+k), one token at a time."""
    after = [*values[1:], last]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    size = len(rewards)
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, size)) for t in range(size)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0)])
def test_gae_equals_its_definition(seed: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 12))
    rewards, values, last = rng.normal(size=size), rng.normal(size=size), float(rng.normal())
    found = gae(rewards, values, last_value=last, gamma=gamma, gae_lambda=lam)
    wanted = gae_by_definition(rewards.tolist(), values.tolist(), last, gamma, lam)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)


def test_with_lambda_1_an_advantage_is_what_was_earned_less_the_value() -> None:
    rng = np.random.default_rng(7)
    rewards, values = rng.normal(size=9), rng.normal(size=9)
    found = gae(rewards, values, last_value=0.0, gamma=1.0, gae_lambda=1.0)
    np.testing.assert_allclose(found, np.cumsum(rewards[::-1])[::-1] - values, rtol=1e-12)


def test_a_completion_without_tokens_has_no_advantages() -> None:
    none = np.zeros(0)
    assert len(gae(none, none, last_value=3.0, gamma=1.0, gae_lambda=1.0)) == 0


def a_batch(seed: int = 0, *, penalties: bool = True) -> RewardBatch:
    rng = np.random.default_rng(seed)
    lengths = np.array([4, 1, 6, 3, 0, 5])
    values = [rng.normal(size=n) for n in lengths]
    last = np.array([0.0, 0.5, 0.0, -0.3, 0.0, 0.0])
    return RewardBatch(
        rewards_S=np.array([1.0, 0.0, 0.5, 1.0, 1.0, np.nan]),
        group_S=np.array([0, 0, 1, 1, 2, 2]),
        lengths_S=lengths,
        trained_S=np.array([True, True, True, False, True, True]),
        penalty_ST=[0.1 * rng.normal(size=n) for n in lengths] if penalties else None,
        critic=CriticValues(values, last, gamma=0.9, gae_lambda=0.8),
    )


@pytest.mark.parametrize("penalties", [False, True])
def test_rewards_of_tokens_are_penalties_and_the_score_at_the_end(penalties: bool) -> None:
    batch = a_batch(penalties=penalties)
    assert batch.critic is not None
    found = advantages(config_of(whiten=False), batch)
    summed = earned(batch)
    for sample in range(4):
        rewards = [-p for p in batch.penalty_ST[sample]] if batch.penalty_ST else None
        rewards = rewards or [0.0] * int(batch.lengths_S[sample])
        rewards[-1] += batch.rewards_S[sample]
        values, last = batch.critic.values_ST[sample], float(batch.critic.last_S[sample])
        wanted = gae_by_definition(rewards, values.tolist(), last, 0.9, 0.8)
        np.testing.assert_allclose(found[sample], wanted, rtol=1e-12)
        whole = gae_by_definition(rewards, [0.0] * len(rewards), last, 0.9, 1.0)
        np.testing.assert_allclose(summed[sample], whole, rtol=1e-12)
    # Without a reward nothing is known of a sample.
    assert len(found[4]) == 0
    assert not found[5].any()


def test_advantages_are_whitened_over_the_trained_tokens() -> None:
    found = advantages(config_of(), a_batch())
    trained = np.concatenate([found[sample] for sample in (0, 1, 2)])
    assert trained.mean() == pytest.approx(0, abs=1e-12)
    assert trained.std() == pytest.approx(1, rel=1e-6)


# The value loss.


def loss_of(value_M, old_M, return_M, *, clip, weights_M=None, denominator=None):
    value = torch.tensor(value_M, dtype=torch.float64, requires_grad=True)
    weights = torch.ones(len(value)) if weights_M is None else torch.tensor(weights_M)
    terms = value_loss(
        value,
        old_value_M=torch.tensor(old_M, dtype=torch.float64),
        return_M=torch.tensor(return_M, dtype=torch.float64),
        weights_M=weights.double(),
        row_of_M=torch.zeros(len(value), dtype=torch.int64),
        num_rows=1,
        spec=value_spec(denominator=denominator or float(len(value_M)), clip=clip),
    )
    terms.loss.backward()
    return terms, value.grad


@pytest.mark.parametrize("clip", [None, 0.1, 0.5])
def test_the_value_loss_and_its_gradient_equal_the_formula(clip: float | None) -> None:
    rng = np.random.default_rng(3)
    old, returns = rng.normal(size=40), rng.normal(size=40)
    value = old + 0.6 * rng.normal(size=40)
    terms, grad = loss_of(value, old, returns, clip=clip)
    losses, slopes, clipped = [], [], 0
    for v, o, r in zip(value, old, returns, strict=True):
        plain, held = (v - r) ** 2, None
        if clip is not None:
            held = (min(max(v, o - clip), o + clip) - r) ** 2
        is_clipped = held is not None and held > plain
        clipped += is_clipped
        losses.append((held if is_clipped else plain) / 2)
        slopes.append(0.0 if is_clipped else v - r)
    assert terms.loss.item() == pytest.approx(np.mean(losses), rel=1e-12)
    np.testing.assert_allclose(grad, np.array(slopes) / 40, rtol=1e-12)
    assert terms.sums["clipped"].item() == clipped
    assert (clipped > 0) == (clip is not None)
    assert terms.sums["value"].item() == pytest.approx(value.sum())


def test_a_value_that_moved_away_from_its_target_is_pulled_back_although_it_left_the_range() -> (
    None
):
    _, grad = loss_of([2.0, 0.9], [0.0, 0.0], [-1.0, 1.0], clip=0.2)
    assert grad[0] > 0
    # This one left the range towards its target.
    assert grad[1] == 0


def test_a_nan_reaches_the_value_loss() -> None:
    for place in range(3):
        inputs = [[0.1, 0.2], [0.0, 0.1], [1.0, 0.0]]
        inputs[place][0] = float("nan")
        terms, _ = loss_of(*inputs, clip=0.2)
        assert torch.isnan(terms.loss)


# The measure.


def test_explained_variance_is_1_for_a_prophet_0_for_a_constant_and_less_for_noise() -> None:
    rng = np.random.default_rng(0)
    gains = rng.normal(size=200)
    assert explained_variance(gains, gains) == pytest.approx(1.0)
    assert explained_variance(np.full(200, 3.0), gains) == pytest.approx(0.0)
    assert explained_variance(gains + 5.0, gains) == pytest.approx(1.0)
    assert explained_variance(-gains, gains) == pytest.approx(-3.0)
    assert explained_variance(rng.normal(size=200), np.full(200, 0.1)) is None


# Several passes over the samples of a step.


def test_every_pass_covers_all_groups_and_later_ones_are_shuffled_by_seed_and_step() -> None:
    first = epoch_spans(10, 3, shuffle=(5, 2, 0))
    assert np.concatenate(first).tolist() == list(range(10))
    second, third = (epoch_spans(10, 3, shuffle=(5, 2, number)) for number in (1, 2))
    assert sorted(np.concatenate(second)) == sorted(np.concatenate(third)) == list(range(10))
    orders = {tuple(np.concatenate(s).tolist()) for s in (first, second, third)}
    assert len(orders) == 3
    again = epoch_spans(10, 3, shuffle=(5, 2, 1))
    assert all(np.array_equal(one, two) for one, two in zip(second, again, strict=True))
    other = epoch_spans(10, 3, shuffle=(5, 3, 1))
    assert not np.array_equal(np.concatenate(other), np.concatenate(second))
    assert [len(span) for span in first] == [len(span) for span in second] == [3, 3, 4]
