"""Every policy-gradient loss, and its gradient, against float64 loops written from the papers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.policy import (
    ALGORITHMS,
    RATIO_ALGORITHMS,
    Row,
    assert_equals_the_formula,
    config_of,
    expected,
    parts_of,
    problem,
    random_rows,
    wide,
)

from homeostat.algorithms.policy import PolicyTokens, policy_loss
from homeostat.types import LossSpec


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("normalise", ["token", "sequence", "fixed"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_equal_the_formula(name, normalise, seed):
    assert_equals_the_formula(random_rows(seed), wide(name, normalise=normalise))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_vetted_defaults_equal_the_formula(name):
    keys = {"fixed_length": 11} if config_of(name).normalise == "fixed" else {}
    assert_equals_the_formula(random_rows(11), config_of(name, **keys))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RATIO_ALGORITHMS)
def test_a_dual_clip_equals_the_formula(name, seed):
    config = wide(name, dual_clip=1.15 if name == "gspo" else 1.5)
    rows = random_rows(seed, num=20, spread=0.9)
    assert_equals_the_formula(rows, config)
    terms = policy_loss(*problem(rows, config))
    assert 0 < terms.sums["dual_clip"] < terms.sums["tokens"]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "cpgd"])
def test_a_kl_penalty_and_an_entropy_bonus_equal_the_formula(name, estimator, weighted):
    kl = {"coefficient": 0.3, "estimator": estimator, "importance_weighted": weighted}
    assert_equals_the_formula(random_rows(5), wide(name, kl=kl, entropy_bonus=0.07))


def test_the_coefficient_that_adapts_replaces_the_configured_one():
    config = wide("grpo", kl={"coefficient": 0.3})
    rows = random_rows(5)
    adapted = policy_loss(*problem(rows, config, kl_coefficient=0.9)).loss
    fixed = policy_loss(*problem(rows, wide("grpo", kl={"coefficient": 0.9}))).loss
    assert torch.equal(adapted, fixed)
    assert not torch.equal(adapted, policy_loss(*problem(rows, config)).loss)


def test_a_penalty_in_the_reward_is_measured_and_not_in_the_loss():
    rows = random_rows(5)
    config = wide("grpo", kl={"coefficient": 0.3, "place": "reward", "estimator": "k1"})
    terms = policy_loss(*problem(rows, config))
    assert torch.equal(terms.loss, policy_loss(*problem(rows, wide("grpo"))).loss)
    want = sum(n - r for row in rows for n, r in zip(row.new, row.ref, strict=True))
    assert terms.sums["kl"].item() == pytest.approx(want)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_float32_is_close_to_float64(name):
    config = wide(name, kl={"coefficient": 0.1}, entropy_bonus=0.01)
    rows = random_rows(3, num=30)
    tokens, spec = problem(rows, config, dtype=torch.float32)
    policy_loss(tokens, spec).loss.backward()
    want = expected(rows, config)
    scale = np.abs(want.grad_logp).max()
    np.testing.assert_allclose(tokens.trainer_logp_M.grad, want.grad_logp, atol=2e-6 * scale)


@pytest.mark.parametrize("cuts", [[[0], [1, 2], [3, 4, 5, 6]], [[0, 1, 2, 3, 4, 5], [6]]])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_nothing_depends_on_the_split_into_micro_batches(name, cuts):
    config = wide(name, kl={"coefficient": 0.2}, entropy_bonus=0.05)
    whole, spec = problem(random_rows(7), config)
    terms = policy_loss(whole, spec)
    terms.loss.backward()
    split, _ = problem(random_rows(7), config)
    found = [policy_loss(part, spec) for part in parts_of(split, cuts)]
    sum(part.loss for part in found).backward()
    torch.testing.assert_close(
        split.trainer_logp_M.grad, whole.trainer_logp_M.grad, rtol=1e-12, atol=0
    )
    torch.testing.assert_close(split.entropy_M.grad, whole.entropy_M.grad)
    torch.testing.assert_close(sum(part.loss for part in found), terms.loss)
    torch.testing.assert_close(torch.cat([p.row_losses_B for p in found]), terms.row_losses_B)
    for key, value in terms.sums.items():
        torch.testing.assert_close(sum(part.sums[key] for part in found), value)
    for key, value in terms.maxima.items():
        assert torch.equal(torch.stack([part.maxima[key] for part in found]).max(), value)


@pytest.mark.parametrize("given", ["none", "equal"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_first_update_has_the_gradient_of_reinforce(name, given):
    config = config_of(name, normalise="token")
    tokens, spec = problem(random_rows(2), config)
    now = tokens.trainer_logp_M.detach().clone()
    old = None if given == "none" else now
    terms = policy_loss(replace(tokens, old_logp_M=old, engine_logp_M=now), spec)
    terms.loss.backward()
    want = -tokens.advantage_M / len(tokens.advantage_M)
    torch.testing.assert_close(tokens.trainer_logp_M.grad, want, rtol=1e-13, atol=0)
    assert terms.sums["ratio"] == terms.sums["tokens"] == len(tokens.advantage_M)
    assert terms.maxima["ratio_max"] == -terms.maxima["ratio_min_neg"] == 1
    assert terms.sums["clip_low"] == terms.sums["clip_high"] == terms.sums["old_kl"] == 0


def test_an_advantage_of_the_same_sign_is_never_pushed_further_once_clipped():
    """The pessimistic bound, case by case: ratio, advantage -> is there a gradient?"""
    config = config_of("grpo", dual_clip=3.0, normalise="token")
    cases = {
        (1.5, 1.0): False, (1.5, -1.0): True, (0.5, 1.0): True, (0.5, -1.0): False,
        (4.0, -1.0): False, (4.0, 1.0): False, (1.1, 1.0): True, (0.9, -1.0): True,
    }  # fmt: skip
    for (ratio, advantage), moves in cases.items():
        row = Row([math.log(ratio)], [0.0], [0.0], [0.0], [0.0], [advantage])
        tokens, spec = problem([row], config)
        policy_loss(tokens, spec).loss.backward()
        assert (tokens.trainer_logp_M.grad.item() != 0) is moves, (ratio, advantage)


def test_cispo_goes_on_learning_from_clipped_tokens():
    tokens, spec = problem(random_rows(4, spread=1.5), wide("cispo"))
    terms = policy_loss(tokens, spec)
    terms.loss.backward()
    assert terms.sums["clip_high"] > 0
    assert terms.sums["clip_low"] > 0
    moved = tokens.trainer_logp_M.grad != 0
    assert torch.equal(moved, tokens.advantage_M != 0)


def test_gspo_clips_a_sequence_as_a_whole():
    rows = random_rows(9, num=30)
    tokens, spec = problem(rows, wide("gspo"))
    policy_loss(tokens, spec).loss.backward()
    moved = tokens.trainer_logp_M.grad != 0
    per_row = [set(moved[tokens.row_of_M == row].tolist()) for row in range(len(rows))]
    assert all(len(each) == 1 for each in per_row)
    assert {True} in per_row
    assert {False} in per_row


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_measured_equals_loops_over_the_tokens(name):
    config = wide(name, kl={"coefficient": 0.2, "estimator": "k2"}, correction=None)
    rows = random_rows(6, num=30)
    terms = policy_loss(*problem(rows, config))
    want = dict.fromkeys(terms.sums, 0.0)
    ratios = []
    for row in rows:
        logs = [n - o for n, o in zip(row.new, row.old, strict=True)]
        for token, log_ratio in enumerate(logs):
            ratio = math.exp(sum(logs) / len(logs) if name == "gspo" else log_ratio)
            advantage, both = row.advantage[token], name == "cispo"
            want["tokens"] += 1
            want["entropy"] += row.entropy[token]
            want["kl"] += (row.new[token] - row.ref[token]) ** 2 / 2
            want["ratio"] += ratio
            low, high = 1 - config.clip_low, 1 + config.clip_high
            if name == "gmpo":
                low, high = math.exp(-config.clip_low), math.exp(config.clip_high)
            clips = name != "sapo"
            want["clip_low"] += clips and ratio < low and (both or advantage < 0)
            want["clip_high"] += clips and ratio > high and (both or advantage > 0)
            want["old_kl"] += math.exp(log_ratio) - 1 - log_ratio
            ratios.append(ratio)
    assert (want["clip_low"] > 0) == (want["clip_high"] > 0) == (name != "sapo")
    assert {key: value.item() for key, value in terms.sums.items()} == pytest.approx(want)
    assert {key: value.item() for key, value in terms.maxima.items()} == pytest.approx(
        {"ratio_max": max(ratios), "ratio_min_neg": -min(ratios)}
    )


def test_what_was_not_given_is_not_measured():
    tokens, spec = problem(random_rows(1), wide("grpo", correction=None))
    terms = policy_loss(replace(tokens, engine_logp_M=None), spec)
    assert "kl" not in terms.sums
    assert not [name for name in terms.sums if name.startswith("sequences")]


def test_all_but_the_loss_is_detached():
    tokens, spec = problem(random_rows(1), wide("grpo", kl={}, entropy_bonus=0.1))
    terms = policy_loss(tokens, spec)
    values = [terms.row_losses_B, *terms.sums.values(), *terms.maxima.values()]
    assert terms.loss.requires_grad
    assert not any(value.requires_grad for value in values)


def test_row_losses_are_means_over_each_rows_tokens():
    config = wide("grpo", normalise="sequence")
    rows = random_rows(8)
    terms = policy_loss(*problem(rows, config))
    want = [expected([row], config).loss for row in rows]
    np.testing.assert_allclose(terms.row_losses_B, want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "place", ["trainer_logp_M", "old_logp_M", "ref_logp_M", "advantage_M", "engine_logp_M"]
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_nan_is_never_hidden(name, place):
    tokens, spec = problem(random_rows(1), wide(name, kl={}))
    sick = getattr(tokens, place).detach().clone()
    sick[3] = math.nan
    terms = policy_loss(replace(tokens, **{place: sick}), spec)
    assert torch.isnan(terms.loss)


@pytest.mark.parametrize("shift", [-1000.0, -60.0, 60.0, 1000.0])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_policy_that_ran_away_has_a_finite_loss_and_gradient(name, shift):
    tokens, spec = problem(random_rows(1), wide(name, kl={}), dtype=torch.float32)
    far = (tokens.trainer_logp_M.detach() + shift).requires_grad_()
    terms = policy_loss(replace(tokens, trainer_logp_M=far), spec)
    terms.loss.backward()
    values = [terms.loss, far.grad, *terms.sums.values(), *terms.maxima.values()]
    assert all(torch.isfinite(value).all() for value in values)


def test_a_micro_batch_without_tokens_adds_nothing():
    _, spec = problem(random_rows(1), wide("gspo", kl={}))
    none = torch.zeros(0, dtype=torch.float64)
    empty = PolicyTokens(
        none.clone().requires_grad_(), none, none, none.long(), 2, none, none, none, none
    )
    terms = policy_loss(empty, spec)
    terms.loss.backward()
    assert terms.loss == 0
    assert terms.row_losses_B.tolist() == [0, 0]
    assert all(value == 0 for value in terms.sums.values())
    assert all(value == -math.inf for value in terms.maxima.values())


@given(
    name=st.sampled_from(ALGORITHMS),
    values=st.lists(
        st.tuples(
            st.floats(-80, 0, width=32), st.floats(-80, 0, width=32),
            st.floats(-80, 0, width=32), st.floats(-10, 10, width=32),
        ),
        min_size=1, max_size=12,
    ),
)  # fmt: skip
def test_finite_inputs_give_finite_losses_and_gradients(name, values):
    new, old, ref, advantage = (list(column) for column in zip(*values, strict=True))
    row = Row(new, old, ref, old, [0.5] * len(new), advantage)
    tokens, spec = problem([row], wide(name, kl={}), dtype=torch.float32)
    terms = policy_loss(tokens, spec)
    terms.loss.backward()
    assert torch.isfinite(terms.loss)
    assert torch.isfinite(tokens.trainer_logp_M.grad).all()


@pytest.mark.parametrize("place", [None, "loss", "reward"])
@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("name", RATIO_ALGORITHMS)
def test_a_spec_is_serialisable_and_complete(name, dual, place):
    kl = None if place is None else {"place": place}
    config = wide(name, dual_clip=dual, kl=kl)
    tokens, spec = problem(random_rows(1), config)
    assert all(isinstance(value, (float, str)) for value in spec.params.values())
    assert ("dual_clip" in spec.params) == (dual is not None)
    assert ("kl_coefficient" in spec.params) == (place == "loss")
    again = LossSpec(**json.loads(json.dumps(asdict(spec))))
    assert torch.equal(policy_loss(tokens, again).loss, policy_loss(tokens, spec).loss)


def test_cpgd_holds_back_tokens_without_an_advantage():
    """The drift is of every token: it pulls back what moved, and has no gradient at the start."""
    row = Row([-1.0, -0.5], [-1.3, -0.4], [0.0] * 2, [-1.3, -0.4], [0.0] * 2, [0.0] * 2)
    tokens, spec = problem([row], config_of("cpgd", drift=0.5, correction=None))
    policy_loss(tokens, spec).loss.backward()
    assert tokens.trainer_logp_M.grad[0] > 0
    assert tokens.trainer_logp_M.grad[1] < 0
    assert config_of("cpgd").has_other_terms
    assert not config_of("cpgd", drift=0.0).has_other_terms


def test_the_slope_of_cpgds_drift_is_bounded():
    far = [Row([x], [0.0], [0.0], [0.0], [0.0], [0.0]) for x in (0.5, 5.0, 50.0)]
    tokens, spec = problem(far, config_of("cpgd", drift=1.0, correction=None, normalise="token"))
    policy_loss(tokens, spec).loss.backward()
    np.testing.assert_allclose(3 * tokens.trainer_logp_M.grad, [0.2, 0.2, 0.2], rtol=1e-12)


def test_sapo_weighs_a_token_less_the_further_its_ratio_is_from_one():
    for advantage in (1.0, -1.0):
        rows = [Row([math.log(r)], [0.0], [0.0], [0.0], [0.0], [advantage]) for r in (1, 2, 4, 8)]
        tokens, spec = problem(rows, config_of("sapo", correction=None))
        policy_loss(tokens, spec).loss.backward()
        weight = tokens.trainer_logp_M.grad.abs() / torch.tensor([1.0, 2.0, 4.0, 8.0])
        assert (weight.diff() < 0).all()
        assert (weight > 0).all()


def test_one_extreme_token_moves_gmpo_less_than_grpo():
    row = Row([0.0, 0.0, 3.0], [0.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3, [-1.0] * 3)
    losses = {}
    for name in ("grpo", "gmpo"):
        tokens, spec = problem([row], config_of(name, normalise="sequence", correction=None))
        losses[name] = policy_loss(tokens, spec).loss.item()
    assert losses["gmpo"] == pytest.approx(math.exp(1.0))
    assert losses["grpo"] == pytest.approx((1 + 1 + math.exp(3.0)) / 3)
