"""The parts that algorithms share: KL, normalisation, overlong punishment; and the SFT loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from homeostat.algorithms import overlong
from homeostat.algorithms.clip import ratio_of
from homeostat.algorithms.kl import ESTIMATORS, k3, next_coefficient
from homeostat.algorithms.normalise import row_weights
from homeostat.algorithms.sft import loss_spec, sft_loss
from homeostat.config.algorithm import SftConfig
from homeostat.types import TokenRow

STEP = {"target": 0.1, "horizon": 1000, "num_samples": 100}


def distributions(seed: int, size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, size, generator=generator, dtype=torch.float64)
    return tuple(torch.log_softmax(logits, dim=1))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(3))
def test_k1_and_k3_are_the_kl_in_expectation(estimator, seed):
    """Over all tokens of a small vocabulary, exactly: no sampling."""
    policy, reference = distributions(seed)
    want = (policy.exp() * (policy - reference)).sum()
    found = (policy.exp() * ESTIMATORS[estimator](policy, reference)).sum()
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize(
    ("estimator", "weighted", "is_exact"),
    [("k1", True, True), ("k3", True, True), ("k2", False, True), ("k1", False, False)],
)
def test_which_estimators_have_the_gradient_of_the_kl(estimator, weighted, is_exact):
    start, reference = distributions(1)
    logits = start.clone().requires_grad_()
    policy = torch.log_softmax(logits, dim=0)
    (want,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    policy = torch.log_softmax(logits, dim=0)
    value_V = ESTIMATORS[estimator](policy, reference)
    ratio_V = (policy - start).exp() if weighted else 1.0
    (found,) = torch.autograd.grad((start.exp() * ratio_V * value_V).sum(), logits)
    if is_exact:
        torch.testing.assert_close(found, want)
    else:
        assert found.abs().max() < 1e-12 < want.abs().max()


def test_k2_is_half_the_square():
    policy, reference = distributions(2)
    want = [(a - b) ** 2 / 2 for a, b in zip(policy.tolist(), reference.tolist(), strict=True)]
    np.testing.assert_allclose(ESTIMATORS["k2"](policy, reference), want)


def test_k3_is_exact_for_tiny_differences_in_float32():
    difference = torch.tensor([1e-2, -1e-3, 1e-4])
    exact = [math.expm1(x) - x for x in difference.double().tolist()]
    found = k3(torch.zeros(3), difference)
    np.testing.assert_allclose(found, exact, rtol=2e-3)
    assert (found >= 0).all()


@pytest.mark.parametrize("gap", [-500.0, -30.0, -1.0, 0.0, 1.0, 30.0, 500.0])
def test_k3_is_finite_and_never_pushes_the_wrong_way(gap):
    logp = torch.zeros(1, requires_grad=True)
    value = k3(logp, torch.full((1,), gap))
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert value >= 0
    # Below the reference the penalty falls as logp grows, above it rises.
    assert logp.grad * gap <= 0


def test_a_ratio_is_exact_up_to_its_bound():
    log_ratio = torch.tensor([-800.0, -15.0, 0.0, 15.0, 800.0], dtype=torch.float64)
    want = [math.exp(min(20.0, x)) for x in log_ratio.tolist()]
    np.testing.assert_allclose(ratio_of(log_ratio), want, rtol=1e-14)
    assert torch.isnan(ratio_of(torch.tensor([math.nan]))).all()


def test_the_coefficient_moves_towards_the_target():
    assert next_coefficient(0.5, kl=0.2, **STEP) == pytest.approx(0.5 * 1.02)
    assert next_coefficient(0.5, kl=0.01, **STEP) == pytest.approx(0.5 * 0.98)
    assert next_coefficient(0.5, kl=0.1, **STEP) == 0.5
    assert next_coefficient(0.5, kl=0.105, **STEP) == pytest.approx(0.5 * (1 + 0.05 * 0.1))


def test_the_coefficient_holds_the_kl_at_its_target():
    """A KL that falls as the coefficient grows: 0.02 / coefficient settles at 0.1."""
    coefficient = 1.0
    for _ in range(400):
        coefficient = next_coefficient(coefficient, kl=0.02 / coefficient, **STEP)
    assert 0.02 / coefficient == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_changes_nothing(kl):
    assert next_coefficient(0.5, kl=kl, **STEP) == 0.5


@given(
    kl=st.floats(-10, 1e6),
    target=st.floats(1e-6, 10),
    horizon=st.integers(1, 10**6),
    num_samples=st.integers(1, 10**6),
)
def test_the_coefficient_stays_positive_and_moves_by_a_fifth_at_most(
    kl, target, horizon, num_samples
):
    found = next_coefficient(1.0, kl=kl, target=target, horizon=horizon, num_samples=num_samples)
    assert 0.8 - 1e-12 <= found <= 1.2 + 1e-12
    assert (found - 1) * (kl - target) >= 0


LENGTHS = np.array([4, 1, 10, 7])


@pytest.mark.parametrize(
    ("normalise", "weights", "denominator"),
    [
        ("token", [1, 0, 1, 1], 21),
        ("sequence", [1 / 4, 0, 1 / 10, 1 / 7], 3),
        ("fixed", [1, 0, 1, 1], 3 * 50),
    ],
)
def test_masked_rows_count_neither_above_nor_below(normalise, weights, denominator):
    trained = np.array([True, False, True, True])
    found, below = row_weights(LENGTHS, trained, normalise=normalise, fixed_length=50)
    np.testing.assert_allclose(found, weights, rtol=1e-15)
    assert below == denominator
    alone, same = row_weights(
        LENGTHS[trained], trained[trained], normalise=normalise, fixed_length=50
    )
    assert np.array_equal(alone, found[trained])
    assert same == below


@pytest.mark.parametrize("normalise", ["token", "sequence", "fixed"])
def test_an_empty_completion_is_not_trained(normalise):
    lengths, trained = np.array([0, 5]), np.array([True, True])
    weights, below = row_weights(lengths, trained, normalise=normalise, fixed_length=8)
    _, alone = row_weights(lengths[1:], trained[1:], normalise=normalise, fixed_length=8)
    assert weights[0] == 0
    assert below == alone


@pytest.mark.parametrize("normalise", ["token", "sequence", "fixed"])
def test_an_update_in_which_nothing_is_trained_has_denominator_0(normalise):
    trained = np.zeros(4, dtype=bool)
    weights, below = row_weights(LENGTHS, trained, normalise=normalise, fixed_length=8)
    assert below == 0
    assert not weights.any()


@pytest.mark.parametrize(
    ("length", "want"), [(1, 0), (60, 0), (61, -0.05), (70, -0.5), (80, -1), (81, -1), (200, -1)]
)
def test_the_overlong_punishment_is_that_of_dapo(length, want):
    sizes = {"max_new_tokens": 80, "buffer_tokens": 20}
    assert overlong.penalty(length, penalty=1.0, **sizes) == pytest.approx(want)
    assert overlong.penalty(length, penalty=0.3, **sizes) == pytest.approx(0.3 * want)


@given(st.integers(0, 500), st.integers(1, 300), st.integers(1, 300), st.floats(0.01, 10))
def test_the_overlong_punishment_falls_with_length(length, limit, buffer, penalty):
    sizes = {"max_new_tokens": limit, "buffer_tokens": buffer, "penalty": penalty}
    here, later = overlong.penalty(length, **sizes), overlong.penalty(length + 1, **sizes)
    assert -penalty <= later <= here <= 0


def sft_rows(seed: int, num: int = 6) -> list[TokenRow]:
    rng = np.random.default_rng(seed)
    rows = []
    for row_id in range(num):
        length = int(rng.integers(2, 9))
        weights = rng.choice([0.0, 0.5, 1.0, 2.0], length).astype(np.float32)
        weights[0] = 0.0
        if row_id == 0:
            weights[:] = 0.0
        rows.append(TokenRow(row_id, rng.integers(0, 50, length), weights))
    return rows


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("normalise", ["token", "row"])
def test_the_sft_loss_equals_loops_over_rows(normalise, seed):
    rows, rng = sft_rows(seed), np.random.default_rng(seed + 100)
    logps = [-rng.random(len(row)) for row in rows]
    means = []
    for row, logp_T in zip(rows, logps, strict=True):
        weight = sum(row.weights_T.tolist())
        total = sum(-w * x for w, x in zip(row.weights_T.tolist(), logp_T, strict=True))
        means.append((total, weight))
    if normalise == "token":
        want = sum(total for total, _ in means) / sum(weight for _, weight in means)
    else:
        per_row = [total / weight for total, weight in means if weight > 0]
        want = sum(per_row) / len(per_row)
    row_of_M = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(r) for r in rows]))
    logp_M = torch.tensor(np.concatenate(logps), requires_grad=True)
    weights_M = torch.tensor(np.concatenate([row.weights_T for row in rows])).double()
    spec = loss_spec(SftConfig(normalise=normalise), rows)
    terms = sft_loss(logp_M, weights_M, row_of_M, len(rows), spec)
    assert terms.loss.item() == pytest.approx(want, rel=1e-12)
    want_rows = [total / weight if weight > 0 else 0.0 for total, weight in means]
    np.testing.assert_allclose(terms.row_losses_B, want_rows, rtol=1e-12)
    assert not terms.row_losses_B.requires_grad
