"""Advantages against plain loops, and what must hold of any: groups, signal, independence."""

from __future__ import annotations

import math
import statistics
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from homeostat.algorithms.baselines import RewardBatch, has_signal
from homeostat.algorithms.catalogue import advantages
from homeostat.config.algorithm import AnyAlgorithm

GROUP_ALGORITHMS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "cpgd", "sapo", "gmpo"]
ALL = [*GROUP_ALGORITHMS, "reinforce_pp"]
NAN = math.nan


def config_of(name: str, **keys):
    return TypeAdapter(AnyAlgorithm).validate_python({"type": name, **keys})


def batch_of(rewards, groups, *, lengths=None, trained=None, penalties=None) -> RewardBatch:
    count = len(rewards)
    return RewardBatch(
        rewards_S=np.array(rewards, dtype=np.float64),
        group_S=np.array(groups, dtype=np.int64),
        lengths_S=np.array(lengths if lengths is not None else [3] * count, dtype=np.int64),
        trained_S=np.array(trained if trained is not None else [True] * count, dtype=bool),
        penalty_ST=penalties,
    )


def random_batch(seed: int, *, penalties: bool = False, masked: bool = False) -> RewardBatch:
    """Groups of different sizes, interleaved; some rewards are missing, some groups constant."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat([4, 9, 1, 7, 30], [5, 2, 8, 1, 4]))
    rewards = rng.choice([-1.0, 0.0, 0.3, 1.0], len(groups))
    rewards[rng.random(len(groups)) < 0.15] = NAN
    rewards[groups == 30] = 0.7
    lengths = rng.integers(1, 7, len(groups))
    trained = rng.random(len(groups)) > (0.3 if masked else -1)
    penalty = [0.1 * rng.standard_normal(length) for length in lengths] if penalties else None
    return batch_of(rewards, groups, lengths=lengths, trained=trained, penalties=penalty)


def expected(config, batch: RewardBatch) -> list[list[float]]:
    """The formulae, one sample at a time."""
    raw = batch.rewards_S.tolist()
    penalties = [[0.0] * int(length) for length in batch.lengths_S]
    if batch.penalty_ST is not None:
        penalties = [penalty_T.tolist() for penalty_T in batch.penalty_ST]
    per_token = config.type == "reinforce_pp"
    rewards = raw if per_token else [r - sum(p) for r, p in zip(raw, penalties, strict=True)]
    known = [index for index, reward in enumerate(rewards) if not math.isnan(reward)]
    result = []
    for index, reward in enumerate(rewards):
        if index not in known:
            result.append([0.0] * len(penalties[index]))
            continue
        others = [j for j in known if j != index and batch.group_S[j] == batch.group_S[index]]
        group = [rewards[j] for j in [*others, index]]
        score = expected_score(config, reward, group, [rewards[j] for j in known])
        result.append(
            expected_returns(score, penalties[index], config.discount)
            if per_token
            else [score] * len(penalties[index])
        )
    return result


def expected_score(config, reward: float, group: list[float], batch: list[float]) -> float:
    """`reward` is the last of its group."""
    if config.type == "reinforce_pp" and not config.baseline:
        return reward
    if len(group) == 1:
        return 0.0
    baseline = statistics.mean(group[:-1] if config.type == "rloo" else group)
    unit = 1.0
    if config.scale != "none":
        unit = statistics.stdev(group if config.scale == "group" else batch) + 1e-4
    return (reward - baseline) / unit


def expected_returns(score: float, penalty: list[float], discount: float) -> list[float]:
    last = len(penalty) - 1
    return [
        discount ** (last - t) * score
        - sum(discount ** (k - t) * penalty[k] for k in range(t, last + 1))
        for t in range(last + 1)
    ]


def assert_same(found, want) -> None:
    assert [len(values) for values in found] == [len(values) for values in want]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(want), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("name", GROUP_ALGORITHMS)
def test_group_advantages_equal_the_formula(name, scale):
    config = config_of(name, scale=scale)
    for seed, penalties in product(range(4), (False, True)):
        batch = random_batch(seed, penalties=penalties)
        assert_same(advantages(config, batch), expected(config, batch))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("penalties", [False, True])
@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_pp_equals_the_formula(baseline, discount, penalties, seed):
    keys = {"baseline": baseline, "discount": discount, "whiten": False}
    config, batch = config_of("reinforce_pp", **keys), random_batch(seed, penalties=penalties)
    assert_same(advantages(config, batch), expected(config, batch))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ALL)
def test_whitening_is_over_the_trained_tokens_of_samples_with_a_reward(name, seed):
    batch = random_batch(seed, penalties=True, masked=True)
    plain = advantages(config_of(name, whiten=False), batch)
    found = advantages(config_of(name, whiten=True), batch)
    counted = [
        index
        for index, reward in enumerate(batch.rewards_S)
        if batch.trained_S[index] and not math.isnan(reward)
    ]
    values = [value for index in counted for value in plain[index]]
    mean, deviation = statistics.mean(values), statistics.pstdev(values)
    for index, values_T in enumerate(found):
        if math.isnan(batch.rewards_S[index]):
            assert not values_T.any()
        else:
            np.testing.assert_allclose(values_T, (plain[index] - mean) / deviation, rtol=1e-6)
    after = np.concatenate([found[index] for index in counted])
    assert after.mean() == pytest.approx(0, abs=1e-12)
    assert after.std() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_differences_too_small_to_square_are_not_blown_up(name):
    found = advantages(config_of(name, whiten=True), batch_of([0.0, 1e-200], [0, 0]))
    assert np.abs(np.concatenate(found)).max() < 1e-100


@pytest.mark.parametrize("name", ALL)
def test_the_bound_comes_last(name):
    batch = random_batch(2)
    plain = advantages(config_of(name, whiten=True), batch)
    found = advantages(config_of(name, whiten=True, advantage_clip=0.4), batch)
    assert max(np.abs(values_T).max() for values_T in plain) > 0.4
    assert_same(found, [np.clip(values_T, -0.4, 0.4) for values_T in plain])


@pytest.mark.parametrize("name", ALL)
def test_mixed_rewards_have_a_signal(name):
    found = advantages(config_of(name), batch_of([1, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 1]))
    for reward, values_T in zip([1, 0, 0, 1, 0, 0], found, strict=True):
        assert (values_T > 0).all() if reward else (values_T < 0).all()


@pytest.mark.parametrize("name", ALL)
def test_the_order_of_samples_does_not_matter(name):
    batch = random_batch(1, penalties=True, masked=True)
    order = np.random.default_rng(0).permutation(len(batch.rewards_S))
    shuffled = batch_of(
        batch.rewards_S[order],
        batch.group_S[order],
        lengths=batch.lengths_S[order],
        trained=batch.trained_S[order],
        penalties=[batch.penalty_ST[index] for index in order],
    )
    plain, found = (advantages(config_of(name), each) for each in (batch, shuffled))
    assert_same(found, [plain[index] for index in order])


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("name", GROUP_ALGORITHMS)
def test_rewards_of_other_groups_do_not_matter(name, scale):
    batch = random_batch(1)
    others = batch.rewards_S.copy()
    others[batch.group_S != 1] = 5 * others[batch.group_S != 1] + 2
    changed = batch_of(others, batch.group_S, lengths=batch.lengths_S)
    before, after = (advantages(config_of(name, scale=scale), each) for each in (batch, changed))
    for index in np.flatnonzero(batch.group_S == 1):
        assert np.array_equal(before[index], after[index])


@pytest.mark.parametrize("change", [-3.0, 0.25, 10.0])
def test_the_baseline_of_rloo_does_not_depend_on_the_sample(change):
    rewards, groups = [0.2, 1.0, -0.5, 0.9], [0, 0, 0, 0]
    before = advantages(config_of("rloo"), batch_of(rewards, groups))
    for index in range(4):
        moved = rewards.copy()
        moved[index] += change
        after = advantages(config_of("rloo"), batch_of(moved, groups))
        np.testing.assert_allclose(after[index] - before[index], change, rtol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_a_sample_without_a_reward_is_as_good_as_absent(name):
    batch = random_batch(5, penalties=True, masked=True)
    known = np.flatnonzero(~np.isnan(batch.rewards_S))
    assert 0 < len(known) < len(batch.rewards_S)
    without = batch_of(
        batch.rewards_S[known],
        batch.group_S[known],
        lengths=batch.lengths_S[known],
        trained=batch.trained_S[known],
        penalties=[batch.penalty_ST[index] for index in known],
    )
    found = advantages(config_of(name), batch)
    assert_same([found[index] for index in known], advantages(config_of(name), without))
    for index in np.flatnonzero(np.isnan(batch.rewards_S)):
        assert len(found[index]) == batch.lengths_S[index]
        assert not found[index].any()


@pytest.mark.parametrize("name", ALL)
def test_a_masked_sample_still_counts_in_its_group(name):
    whiten = {"whiten": False}
    all_trained = advantages(config_of(name, **whiten), batch_of([1, 0, 0], [0, 0, 0]))
    masked = batch_of([1, 0, 0], [0, 0, 0], trained=[True, False, True])
    assert_same(advantages(config_of(name, **whiten), masked), all_trained)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("name", GROUP_ALGORITHMS)
def test_equal_rewards_have_an_advantage_of_exactly_0(name, scale):
    for equal in ([0.1] * 8, [1 / 3] * 7, [0.1 + 0.2, 0.3, 0.3], [-1e6 / 7] * 5):
        rewards, groups = [*equal, 0.0, 1.0], [0] * len(equal) + [1, 1]
        found = advantages(config_of(name, scale=scale), batch_of(rewards, groups))
        assert all(not values_T.any() for values_T in found[:-2]), equal
        assert all(values_T.all() for values_T in found[-2:]), equal


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("rewards", "groups"),
    [([0.4], [0]), ([NAN, NAN], [0, 0]), ([NAN, 0.4], [0, 0]), ([0.3, 0.3], [0, 1]), ([], [])],
)
def test_where_nothing_can_be_compared_the_advantage_is_0(name, rewards, groups):
    found = advantages(config_of(name), batch_of(rewards, groups))
    assert len(found) == len(rewards)
    assert all(not values_T.any() for values_T in found)


def test_single_samples_are_compared_with_the_batch_by_reinforce_pp():
    found = advantages(config_of("reinforce_pp"), batch_of([0.0, 1.0, 1.0], [0, 1, 2]))
    assert [np.sign(values_T).tolist() for values_T in found] == [[-1] * 3, [1] * 3, [1] * 3]


@pytest.mark.parametrize("name", ALL)
def test_a_completion_without_tokens_counts_as_a_reward_only(name):
    found = advantages(config_of(name), batch_of([1, 0, 0], [0, 0, 0], lengths=[2, 0, 3]))
    assert [len(values_T) for values_T in found] == [2, 0, 3]
    assert found[0][0] > 0 > found[2][0]


def test_a_batch_is_checked():
    with pytest.raises(AssertionError, match="infinite"):
        batch_of([math.inf], [0])
    with pytest.raises(AssertionError, match="samples"):
        batch_of([1.0], [0, 0])
    with pytest.raises(AssertionError, match="penalties"):
        batch_of([1.0], [0], lengths=[2], penalties=[np.zeros(3)])


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [
        ([0.0, 1.0], True), ([0.0, 1e-6], True), ([1.0, 1.0], False), ([0.0, 0.0], False),
        ([0.1 + 0.2, 0.3], False), ([NAN, 1.0], False), ([NAN, 0.0, 1.0], True), ([], False),
        ([-1.0, 1.0], True), ([NAN], False),
    ],
)  # fmt: skip
def test_a_group_has_signal_where_known_rewards_differ(rewards, signal):
    assert has_signal(np.array(rewards, dtype=np.float64)) is signal


samples = st.lists(
    st.tuples(
        st.one_of(st.floats(-1e100, 1e100), st.floats(-1, 1), st.just(NAN)),
        st.integers(0, 3), st.integers(0, 4), st.booleans(),
    ),
    max_size=12,
)  # fmt: skip


@given(
    name=st.sampled_from(ALL),
    samples=samples,
    scale=st.sampled_from(["group", "batch", "none"]),
    whiten=st.booleans(),
)
def test_finite_rewards_give_finite_advantages(name, samples, scale, whiten):
    columns = [list(column) for column in zip(*samples, strict=True)] or [[], [], [], []]
    batch = batch_of(columns[0], columns[1], lengths=columns[2], trained=columns[3])
    keys = {"baseline": True} if name == "reinforce_pp" else {"scale": scale}
    found = advantages(config_of(name, whiten=whiten, **keys), batch)
    assert [len(values_T) for values_T in found] == columns[2]
    assert all(np.isfinite(values_T).all() for values_T in found)
