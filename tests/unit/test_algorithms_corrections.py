"""Off-policy corrections: gradients against float64 loops, what stays as it was, and the counts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from tests.support.policy import (
    ALGORITHMS,
    Row,
    assert_equals_the_formula,
    bounded_weight,
    config_of,
    expected,
    factor,
    mismatch,
    parts_of,
    problem,
    random_rows,
    share,
    wide,
)

from homeostat.algorithms.corrections.correct import correct, correction_params
from homeostat.algorithms.corrections.weight import WeightRule, mean_weight
from homeostat.algorithms.policy import policy_loss
from homeostat.config.policy_gradient import LOSS_PARAMS
from homeostat.types import LossSpec

# Bounds that the ratios of `far_rows` leave on both sides, at each level.
BANDS = {
    "token": {"low": 0.7, "high": 1.4},
    "sequence": {"low": 0.6, "high": 1.6},
    "geometric": {"low": 0.9, "high": 1.1},
}
LEVELS = list(BANDS)
CORRECTIONS: dict[str, dict] = {
    **{
        f"{level}-{outside}": {"weight": {"type": level, "outside": outside, **BANDS[level]}}
        for level in LEVELS
        for outside in ("truncate", "mask")
    },
    "high-only": {"weight": {"type": "token", "high": 1.4}},
    "high-only-mask": {"weight": {"type": "token", "high": 1.4, "outside": "mask"}},
    **{
        f"reject-{level}": {"weight": None, "reject": {"type": level, **BANDS[level]}}
        for level in LEVELS
    },
    "veto": {"weight": None, "veto": 0.6},
    "off-policy": {"weight": None, "off_policy_mask": 0.1},
    "all": {
        "weight": {"type": "token", "low": 0.5, "high": 1.5},
        "reject": {"type": "geometric", **BANDS["geometric"]},
        "veto": 0.6,
        "off_policy_mask": 0.1,
    },
}

WEIGHTS = [name for name, rules in CORRECTIONS.items() if rules["weight"] is not None]


def far_rows(seed: int = 3, *, num: int = 24) -> list[Row]:
    return random_rows(seed, num=num, engine_spread=0.3)


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo"])
def test_loss_and_gradient_equal_the_formula(algorithm, name):
    config = wide(algorithm, correction=CORRECTIONS[name])
    rows = far_rows()
    assert_equals_the_formula(rows, config)
    found = {factor(row, 0, config, weight_mean=1.0) for row in rows}
    assert len(found) > 1, "this correction does nothing here"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("normalise", ["token", "sequence", "fixed"])
def test_every_algorithm_is_corrected_alike(algorithm, normalise):
    config = wide(algorithm, correction=CORRECTIONS["all"], normalise=normalise)
    assert_equals_the_formula(far_rows(9), config)


def test_kl_and_entropy_are_not_corrected():
    """All surrogates are masked; what is left is the leash alone, at its full length."""
    keys = {"kl": {"coefficient": 0.3, "importance_weighted": True}, "entropy_bonus": 0.07}
    nothing = {"weight": None, "reject": {"type": "token", "low": 1e5, "high": 1e6}}
    rows = far_rows()
    assert_equals_the_formula(rows, wide("grpo", correction=CORRECTIONS["all"], **keys))
    masked = policy_loss(*problem(rows, wide("grpo", correction=nothing, **keys))).loss
    idle = [replace_advantage(row, 0.0) for row in rows]
    leash = policy_loss(*problem(idle, wide("grpo", correction=None, **keys))).loss
    torch.testing.assert_close(masked, leash, rtol=1e-13, atol=0)


def replace_advantage(row: Row, value: float) -> Row:
    return replace(row, advantage=[value] * len(row.new))


@pytest.mark.parametrize("normalise", ["token", "sequence", "fixed"])
def test_what_is_left_out_still_counts_in_the_denominator(normalise):
    """A masked row is a gradient of 0: the others move as far as they did with it."""
    rows = far_rows()
    one = {"weight": None, "veto": 0.6}
    gone = [min(mismatch(row, t, "token") for t in range(len(row.old))) < 0.6 for row in rows]
    assert 0 < sum(gone) < len(rows)
    tokens, spec = problem(rows, wide("grpo", correction=one, normalise=normalise))
    plain, plain_spec = problem(rows, wide("grpo", correction=None, normalise=normalise))
    policy_loss(tokens, spec).loss.backward()
    policy_loss(plain, plain_spec).loss.backward()
    keep_M = ~torch.tensor(gone)[tokens.row_of_M]
    assert torch.equal(tokens.trainer_logp_M.grad, plain.trainer_logp_M.grad * keep_M)


@pytest.mark.parametrize("cuts", [[[0], [1, 2], [3, 4, 5, 6]], [[6, 5, 0, 1], [2], [4, 3]]])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_nothing_depends_on_the_split_into_micro_batches(name, cuts):
    config = wide("grpo", correction=CORRECTIONS[name], kl={"coefficient": 0.2})
    rows = far_rows(7, num=7)
    whole, spec = problem(rows, config, weight_mean=1.3)
    terms = policy_loss(whole, spec)
    terms.loss.backward()
    split, _ = problem(rows, config)
    found = [policy_loss(part, spec) for part in parts_of(split, cuts)]
    sum(part.loss for part in found).backward()
    torch.testing.assert_close(
        split.trainer_logp_M.grad, whole.trainer_logp_M.grad, rtol=1e-12, atol=1e-15
    )
    torch.testing.assert_close(sum(part.loss for part in found), terms.loss, rtol=1e-12, atol=1e-15)
    for key, value in terms.sums.items():
        torch.testing.assert_close(sum(part.sums[key] for part in found), value)


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_where_engine_and_trainer_agree_it_changes_not_a_bit(algorithm, name):
    rows = [replace(row, engine=row.old, new=row.old) for row in far_rows()]
    found = []
    for correction in (CORRECTIONS[name], None):
        config = wide(algorithm, correction=correction, entropy_bonus=0.1)
        tokens, spec = problem(rows, config, dtype=torch.float32)
        loss = policy_loss(tokens, spec).loss
        loss.backward()
        found.append((loss, tokens.trainer_logp_M.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_default_is_on_and_bounds_what_one_token_can_do(algorithm):
    """The engine found one token all but impossible: uncorrected weights would be 5e8."""
    config = wide(algorithm)
    rule = config.correction.weight
    assert (rule.type, rule.outside) == (
        "geometric" if algorithm == "gspo" else "token",
        "truncate",
    )
    rows = far_rows()
    rows[3].engine[0] -= 60.0
    tokens, spec = problem(rows, config)
    correction = correct(tokens, tokens.old_logp_M, spec.params)
    assert correction.factor_M.max() == rule.high
    assert_equals_the_formula(rows, config)


# Normalisation.


@pytest.mark.parametrize("normalise", ["token", "sequence", "fixed"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_mean_weight_is_over_the_update_as_the_loss_counts_it(name, normalise):
    config = wide("grpo", correction=CORRECTIONS[name], normalise=normalise)
    rows = far_rows()
    pairs = [
        (share(rows, row, config), bounded_weight(row, token, config.correction.weight))
        for row in rows
        for token in range(len(row.old))
    ]
    counted = [(part, weight) for part, weight in pairs if weight > 0]
    want = sum(part * weight for part, weight in counted) / sum(part for part, _ in counted)
    tokens, spec = problem(rows, config)
    got = mean_weight(
        tokens.old_logp_M - tokens.engine_logp_M,
        tokens.row_of_M,
        tokens.num_rows,
        WeightRule.of(spec.params),
        counts_M=tokens.weights_M,
    )
    assert got == pytest.approx(want, rel=1e-12)
    assert_equals_the_formula(rows, config, weight_mean=want)


@pytest.mark.parametrize("outside", ["truncate", "mask"])
def test_the_mean_of_weights_of_1_is_exactly_1(outside):
    config = wide("grpo", correction={"weight": {"type": "sequence", "outside": outside}})
    tokens, spec = problem(far_rows(), config)
    zeros, rule = torch.zeros_like(tokens.old_logp_M), WeightRule.of(spec.params)
    rows = (tokens.row_of_M, tokens.num_rows)
    assert mean_weight(zeros, *rows, rule, counts_M=tokens.weights_M / 7) == 1.0


def test_the_mean_of_masked_weights_alone_is_1_and_not_a_division_by_0():
    config = wide("grpo", correction=CORRECTIONS["token-mask"])
    tokens, spec = problem(far_rows(), config)
    far_M, rule = torch.full_like(tokens.old_logp_M, 9.0), WeightRule.of(spec.params)
    rows = (tokens.row_of_M, tokens.num_rows)
    assert mean_weight(far_M, *rows, rule, counts_M=tokens.weights_M) == 1.0


# Counts.


def test_tokens_and_sequences_are_counted_for_each_part():
    rules = {
        "weight": {"type": "token", "high": 1.3, "outside": "truncate"},
        "reject": {"type": "sequence", "low": 0.5, "high": 2.0},
        "veto": 0.6,
        "off_policy_mask": 0.1,
    }
    rows, config = far_rows(), wide("grpo", correction=rules)
    terms = policy_loss(*problem(rows, config))
    want = dict.fromkeys(terms.sums, 0.0)
    for row in rows:
        tokens = range(len(row.old))
        fallen = np.mean(np.array(row.engine) - np.array(row.new))
        acted = {
            "truncated": [mismatch(row, t, "token") > 1.3 for t in tokens],
            "rejected": [not 0.5 <= mismatch(row, t, "sequence") <= 2.0 for t in tokens],
            "vetoed": [min(mismatch(row, u, "token") for u in tokens) < 0.6] * len(tokens),
            "off_policy": [row.advantage[t] < 0 and fallen > 0.1 for t in tokens],
        }
        for name, acted_T in acted.items():
            want[f"tokens_{name}"] += sum(acted_T)
            want[f"sequences_{name}"] += any(acted_T)
        want["factor"] += sum(factor(row, t, config, weight_mean=1.0) for t in tokens)
        want["sequences"] += 1
    names = [name for name in want if name.startswith(("tokens_", "sequences", "factor"))]
    assert len(names) == 10
    assert all(want[name] > 0 for name in names)
    found = {name: terms.sums[name].item() for name in names}
    assert found == pytest.approx({name: want[name] for name in names})


# Numbers that are not.


@pytest.mark.parametrize("place", ["old_logp_M", "engine_logp_M"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_nan_is_never_hidden(name, place):
    tokens, spec = problem(far_rows(), wide("grpo", correction=CORRECTIONS[name]))
    sick = getattr(tokens, place).clone()
    sick[3] = math.nan
    assert torch.isnan(policy_loss(replace(tokens, **{place: sick}), spec).loss)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_nan_in_a_row_that_is_dropped_is_not_hidden(name):
    rows = far_rows()
    rows[1].engine = [old + 50.0 for old in rows[1].old]
    tokens, spec = problem(rows, wide("grpo", correction=CORRECTIONS[name]))
    sick = tokens.engine_logp_M.clone()
    sick[len(rows[0].old)] = math.nan
    assert torch.isnan(policy_loss(replace(tokens, engine_logp_M=sick), spec).loss)


@pytest.mark.parametrize("shift", [-1000.0, -60.0, 60.0, 1000.0, -math.inf])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_an_engine_that_is_far_off_gives_a_finite_loss_and_gradient(name, shift):
    tokens, spec = problem(
        far_rows(), wide("grpo", correction=CORRECTIONS[name]), dtype=torch.float32
    )
    terms = policy_loss(replace(tokens, engine_logp_M=tokens.engine_logp_M + shift), spec)
    terms.loss.backward()
    values = [terms.loss, tokens.trainer_logp_M.grad, *terms.sums.values()]
    assert all(torch.isfinite(value).all() for value in values)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_has_no_gradient_of_its_own(name):
    """In the first update old is now: the ratio to the engine moves with the weights, and yet only
    the surrogate has a gradient."""
    rows = [replace(row, old=row.new) for row in far_rows()]
    config = wide("grpo", correction=CORRECTIONS[name])
    tokens, spec = problem(rows, config)
    policy_loss(replace(tokens, old_logp_M=None), spec).loss.backward()
    want = expected(rows, config).grad_logp
    np.testing.assert_allclose(tokens.trainer_logp_M.grad, want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_spec_is_serialisable_and_complete(name):
    tokens, spec = problem(far_rows(), wide("grpo", correction=CORRECTIONS[name]), weight_mean=1.2)
    assert all(isinstance(value, (float, str)) for value in spec.params.values())
    again = LossSpec(**json.loads(json.dumps(asdict(spec))))
    assert torch.equal(policy_loss(tokens, again).loss, policy_loss(tokens, spec).loss)


def test_without_the_engines_log_probs_there_is_no_correction():
    tokens, spec = problem(far_rows(), wide("grpo"))
    with pytest.raises(AssertionError, match="engine's log-probs"):
        policy_loss(replace(tokens, engine_logp_M=None), spec)


def test_a_plugins_key_cannot_have_the_name_of_a_correction() -> None:
    correction = {
        "weight": {"type": "token", "low": 0.5},
        "reject": {"type": "token"},
        "veto": 1e-4,
        "off_policy_mask": 0.1,
    }
    config = config_of("grpo", correction=correction)
    assert set(correction_params(config.correction, weight_mean=1.0)) <= LOSS_PARAMS
