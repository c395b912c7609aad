"""Cases of the keys of the policy-gradient algorithms, each judged for every algorithm.

All on the same saved rollouts. BASE puts the algorithms on one footing: tokens count the same, no
group is replaced, nothing is done about length. What a key must do is then arithmetic on what the
run left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
from tests.support.every_key.rl_workshop import (
    OTHER_REFERENCE,
    SAMPLED_ONLY,
    SAVED,
    Samples,
    only,
    samples,
)
from tests.support.every_key.workshop import Case, Run, Workshop, all_of, assert_same, weight_bytes

from homeostat.config.algorithm import AnyPolicyGradient
from homeostat.errors import ConfigError

KINDS = [cls.model_fields["type"].annotation.__args__[0] for cls in AnyPolicyGradient.__args__]
BASE = "normalise: token, dynamic_sampling: null, overlong: {type: keep}"
# The ratio leaves 1 in the second of two updates.
UPDATES = ("trainer.updates_per_step=2", "trainer.lr=0.003")
KL = ("algorithm.kl={coefficient: 1.0}", OTHER_REFERENCE)
# No sample is rewarded, so every round is discarded.
HOPELESS = ("rewards.functions.0.pattern=no",)

# Algorithms that have the unit of their advantages from something else.
UNSCALED = {
    "reinforce_pp": "because it whitens them",
    "ppo": "because it whitens them",
    "ebft": "ebft.advantage_estimator decides",
}
# An energy is never 0.
WITHOUT_ENERGY = "ebft={alignment_coefficient: 0.0, diversity_coefficient: 0.0}"

KindCase = Callable[[Workshop, str], None]


def learned(workshop: Workshop, kind: str, *changes: str) -> Run:
    return workshop.run(*SAVED, f"algorithm={{type: {kind}, {BASE}}}", *changes)


def group_means(found: Samples) -> np.ndarray:
    means = [found.reward_S[found.group_S == group].mean() for group in np.unique(found.group_S)]
    return np.array(means)[found.group_S.astype(int)]


def group_deviations(found: Samples) -> np.ndarray:
    groups = np.unique(found.group_S)
    stds = [found.reward_S[found.group_S == group].std(ddof=1) for group in groups]
    return np.array(stds)[found.group_S.astype(int)]


def refused(workshop: Workshop, kind: str, change: str, why: str) -> None:
    learned(workshop, kind)
    with pytest.raises(ConfigError, match=why):
        learned(workshop, kind, change)


# The surrogate.


def a_type_is_an_algorithm_with_its_defaults(workshop: Workshop, kind: str) -> None:
    # With one update, ratios are 1 and some of them are the same; with values of 0, PPO is
    # REINFORCE++.
    more = {"ppo": ("critic={head_init: random}",)}
    made = {
        name: workshop.run(*SAVED, f"algorithm={{type: {name}}}", *UPDATES, *more.get(name, ()))
        for name in KINDS
    }
    mine = weight_bytes(made.pop(kind))
    assert all(weight_bytes(run) != mine for run in made.values())


def a_bound_clips(workshop: Workshop, kind: str, *, side: str) -> None:
    if kind == "sapo":
        refused(workshop, kind, f"algorithm.clip_{side}=0.3", "soft gate")
        return
    other = {"low": "high", "high": "low"}[side]
    tight = (*UPDATES, "algorithm.clip_low=0.001", "algorithm.clip_high=0.001")
    before = learned(workshop, kind, *tight)
    after = learned(workshop, kind, *tight, f"algorithm.clip_{side}=0.95")
    assert only(f"clip_ratio/{side}_mean", before) > only(f"clip_ratio/{side}_mean", after)
    name = f"clip_ratio/{other}_mean"
    assert only(name, before) == only(name, after) > 0
    assert weight_bytes(before) != weight_bytes(after)


def a_dual_clip_bounds_what_became_likely(workshop: Workshop, kind: str) -> None:
    change = "algorithm.dual_clip=1.001"
    why = {
        "cispo": "bounds the weight of a token on both sides",
        "cpgd": "does not weight tokens by their ratio",
        "sapo": "limits large ratios by its gate",
        "gmpo": "before it enters the mean",
    }
    if kind in why:
        refused(workshop, kind, change, why[kind])
        return
    # Nothing else is clipped, and the ratios of rows with a negative advantage rise, too.
    loose = (*UPDATES, "algorithm.clip_low=0.999", "algorithm.clip_high=1000.0")
    before, after = (learned(workshop, kind, *loose, *more) for more in ((), (change,)))
    assert only("clip_ratio/region_mean", after) == 0
    assert only("train/loss", after) < only("train/loss", before)
    assert_same(before, learned(workshop, kind, *loose, "algorithm.dual_clip=1000.0"))


def a_loss_is_normalised(workshop: Workshop, kind: str) -> None:
    token, fixed, sequence = (
        learned(workshop, kind, f"algorithm.normalise={how}")
        for how in ("token", "fixed", "sequence")
    )
    # Sums over the same tokens, divided by their number or by completions times 6.
    share = only("completions/mean_length", token) / 6
    assert only("grad_norm", fixed) == pytest.approx(only("grad_norm", token) * share, rel=1e-5)
    assert share < 0.99
    assert only("grad_norm", sequence) != pytest.approx(only("grad_norm", token), rel=1e-3)
    assert only("grad_norm", sequence) != pytest.approx(only("grad_norm", fixed), rel=1e-3)


def a_fixed_length_divides(workshop: Workshop, kind: str) -> None:
    fixed = "algorithm.normalise=fixed"
    six, twelve = (
        learned(workshop, kind, fixed, *more) for more in ((), ("algorithm.fixed_length=12",))
    )
    assert only("grad_norm", twelve) == pytest.approx(only("grad_norm", six) / 2, rel=1e-5)
    refused(workshop, kind, "algorithm.fixed_length=12", "does not use this key")


# Advantages.


def advantages_are_scaled(workshop: Workshop, kind: str) -> None:
    if kind in UNSCALED:
        refused(workshop, kind, "algorithm.scale=group", UNSCALED[kind])
        return
    none, group, batch = (
        samples(learned(workshop, kind, f"algorithm.scale={how}"))
        for how in ("none", "group", "batch")
    )
    assert none.advantage_S.any()
    by_group = none.advantage_S / (group_deviations(none) + 1e-4)
    assert group.advantage_S == pytest.approx(by_group, rel=1e-6)
    by_batch = none.advantage_S / (none.reward_S.std(ddof=1) + 1e-4)
    assert batch.advantage_S == pytest.approx(by_batch, rel=1e-6)


def advantages_are_whitened(workshop: Workshop, kind: str) -> None:
    plain, white = (
        samples(learned(workshop, kind, f"algorithm.whiten={on}")) for on in ("false", "true")
    )
    lengths = plain.length_S.astype(int)
    plain_N, white_N = (np.repeat(found.advantage_S, lengths) for found in (plain, white))
    assert abs(plain_N.mean()) > 1e-3
    assert white_N == pytest.approx((plain_N - plain_N.mean()) / plain_N.std(), abs=1e-5)


def advantages_are_clipped(workshop: Workshop, kind: str) -> None:
    plain, held = (
        samples(learned(workshop, kind, *more)).advantage_S
        for more in ((), ("algorithm.advantage_clip=0.3",))
    )
    assert np.abs(plain).max() > 0.3
    assert held == pytest.approx(plain.clip(-0.3, 0.3))


def a_group_mean_is_taken_off(workshop: Workshop, kind: str) -> None:
    raw = "algorithm.whiten=false"
    plain, off = (
        samples(learned(workshop, kind, raw, *more)) for more in ((), ("algorithm.baseline=true",))
    )
    assert plain.advantage_S == pytest.approx(plain.reward_S)
    assert off.advantage_S == pytest.approx(off.reward_S - group_means(off))


def later_rewards_are_discounted(workshop: Workshop, kind: str) -> None:
    raw = "algorithm.whiten=false"
    found = samples(learned(workshop, kind, raw, "algorithm.discount=0.5"))
    means = [np.mean(0.5 ** np.arange(int(length))) for length in found.length_S]
    assert found.advantage_S == pytest.approx(found.reward_S * means)


def rows_without_advantage_are_left_out(workshop: Workshop, kind: str) -> None:
    # Of whitened returns none is 0, and a drift has a gradient everywhere.
    off = {"cpgd": ["algorithm.drift=0.0"], "ebft": [WITHOUT_ENERGY]}
    raw = ("algorithm.whiten=false", *off.get(kind, []))
    skipped, whole = (
        learned(workshop, kind, *raw, f"algorithm.skip_zero_advantage={on}")
        for on in ("true", "false")
    )
    has_some = samples(skipped).advantage_S != 0
    assert only("data/trained_rows", skipped) == has_some.sum() < 16
    assert only("data/trained_rows", whole) == 16
    for name in ("train/loss", "grad_norm"):
        assert only(name, skipped) == pytest.approx(only(name, whole), abs=1e-6)


# What is added to the objective.


def entropy_is_rewarded(workshop: Workshop, kind: str) -> None:
    plain, rewarded = (
        learned(workshop, kind, *more) for more in ((), ("algorithm.entropy_bonus=0.5",))
    )
    expected = only("train/loss", plain) - 0.5 * only("entropy", rewarded)
    assert only("train/loss", rewarded) == pytest.approx(expected, rel=1e-5)
    assert weight_bytes(plain) != weight_bytes(rewarded)


def a_kl_term_is_weighted(workshop: Workshop, kind: str) -> None:
    plain, held = learned(workshop, kind), learned(workshop, kind, *KL)
    more = learned(workshop, kind, *KL, "algorithm.kl.coefficient=3.0")
    assert only("kl", held) == only("kl", more) > 0.1
    for run, coefficient in ((held, 1.0), (more, 3.0)):
        expected = only("train/loss", plain) + coefficient * only("kl", run)
        assert only("train/loss", run) == pytest.approx(expected, rel=1e-5)
        assert only("kl_coefficient", run) == coefficient


def a_kl_is_estimated(workshop: Workshop, kind: str) -> None:
    in_reward = (*KL, "algorithm.kl.place=reward")
    found = [
        only("kl", learned(workshop, kind, *in_reward, f"algorithm.kl.estimator={name}"))
        for name in ("k1", "k2", "k3")
    ]
    assert len({round(value, 4) for value in found}) == 3
    k2 = learned(workshop, kind, *KL, "algorithm.kl.estimator=k2")
    assert only("kl", k2) == pytest.approx(found[1], rel=1e-5)
    refused(workshop, kind, "algorithm.kl={estimator: k1}", "gradient of 0 on average")


def a_kl_has_its_place(workshop: Workshop, kind: str) -> None:
    plain, in_loss = learned(workshop, kind), learned(workshop, kind, *KL)
    in_reward = learned(workshop, kind, *KL, "algorithm.kl.place=reward")
    advantages = [samples(run).advantage_S for run in (plain, in_loss, in_reward)]
    assert advantages[0] == pytest.approx(advantages[1])
    # Not a rounding: the samples of a group differ in how far they are from the reference.
    assert np.abs(advantages[2] - advantages[0]).max() > 0.1
    assert weight_bytes(in_loss) != weight_bytes(in_reward)


def a_kl_gradient_is_weighted(workshop: Workshop, kind: str) -> None:
    plain, weighted = (
        learned(workshop, kind, *KL, *more)
        for more in ((), ("algorithm.kl.importance_weighted=true",))
    )
    # The ratio is 1, and its gradient is not 0.
    assert only("train/loss", plain) == pytest.approx(only("train/loss", weighted), rel=1e-5)
    assert only("grad_norm", plain) != pytest.approx(only("grad_norm", weighted), rel=1e-3)


def a_kl_coefficient_adapts(workshop: Workshop, kind: str) -> None:
    for target, factor in ((1e-6, 1 + 0.2 * 0.16), (1e6, 1 - 0.2 * 0.16)):
        aimed = ("algorithm.kl.horizon=100", f"algorithm.kl.target={target}")
        assert only("kl_coefficient", learned(workshop, kind, *KL, *aimed)) == pytest.approx(factor)


def a_kl_coefficient_takes_its_time(workshop: Workshop, kind: str) -> None:
    aimed = (*KL, "algorithm.kl.target=1e-6")
    found = [
        only("kl_coefficient", learned(workshop, kind, *aimed, f"algorithm.kl.horizon={horizon}"))
        for horizon in (16, 160)
    ]
    assert found == pytest.approx([1.2, 1.02])
    refused(workshop, kind, "algorithm.kl={horizon: 16}", "the coefficient never changes")


# Groups that teach nothing, and completions that are too long.


def rounds_are_bounded(workshop: Workshop, kind: str) -> None:
    four = "algorithm.dynamic_sampling={max_rounds: 4}"
    if kind == "ebft":
        refused(workshop, kind, four, "are hardly ever equal")
        return
    name = "name=hopeless"
    sampled = workshop.run(name, *SAMPLED_ONLY, *HOPELESS, four)
    rollouts = f"debug.rollouts=runs/{sampled.config.name}"
    for rounds in (4, 2):
        bound = f"algorithm.dynamic_sampling={{max_rounds: {rounds}}}"
        run = learned(workshop, kind, rollouts, bound)
        assert only("rollout/rounds", run) == rounds
        assert only("rollout/groups_passed_over", run) == 4 * rounds
    assert only("rollout/rounds", sampled) == 4


def penalties(found: Samples, *, buffer: int, penalty: float) -> float:
    return float(np.mean(-penalty * ((found.length_S - (6 - buffer)) / buffer).clip(0, 1)))


def overlong(workshop: Workshop, kind: str, settings: str) -> Run:
    return learned(workshop, kind, f"algorithm.overlong={{{settings}}}")


def overlong_samples_are(workshop: Workshop, kind: str, *, how: str) -> None:
    run = overlong(workshop, kind, f"type: {how}")
    found = samples(run)
    cut_share = only("completions/clipped_ratio", run)
    assert cut_share > 0
    assert only("rollout/untrained_share", run) == (cut_share if how == "mask" else 0)
    expected = penalties(found, buffer=1, penalty=1.0) if how == "shape" else 0.0
    assert only("rollout/overlong_penalty", run) == pytest.approx(expected)
    plain = samples(overlong(workshop, kind, "type: keep")).advantage_S
    # Masked samples still count in their groups; whitening is over what is trained.
    same = how == "keep" or (how == "mask" and kind not in ("reinforce_pp", "ppo"))
    assert (found.advantage_S == pytest.approx(plain)) == same


def overlong_buffer(workshop: Workshop, kind: str) -> None:
    run = overlong(workshop, kind, "type: shape, buffer_tokens: 3")
    expected = penalties(samples(run), buffer=3, penalty=1.0)
    assert only("rollout/overlong_penalty", run) == pytest.approx(expected)
    one = overlong(workshop, kind, "type: shape")
    assert only("rollout/overlong_penalty", one) != pytest.approx(expected)
    assert weight_bytes(one) != weight_bytes(run)


def overlong_penalty(workshop: Workshop, kind: str) -> None:
    one, half = (overlong(workshop, kind, f"type: shape{more}") for more in ("", ", penalty: 0.5"))
    name = "rollout/overlong_penalty"
    assert only(name, one) < 0
    assert only(name, half) == pytest.approx(only(name, one) / 2)
    assert weight_bytes(one) != weight_bytes(half)


# Key -> its check, for an algorithm. Those of OWN are keys of some algorithms alone.
TYPED: dict[str, KindCase] = {
    "type": a_type_is_an_algorithm_with_its_defaults,
    "clip_low": partial(a_bound_clips, side="low"),
    "clip_high": partial(a_bound_clips, side="high"),
    "dual_clip": a_dual_clip_bounds_what_became_likely,
    "normalise": a_loss_is_normalised,
    "fixed_length": a_fixed_length_divides,
    "scale": advantages_are_scaled,
    "whiten": advantages_are_whitened,
    "advantage_clip": advantages_are_clipped,
    "entropy_bonus": entropy_is_rewarded,
    "skip_zero_advantage": rows_without_advantage_are_left_out,
}
OWN: dict[str, tuple[str, KindCase]] = {
    "baseline": ("reinforce_pp", a_group_mean_is_taken_off),
    "discount": ("reinforce_pp", later_rewards_are_discounted),
}
# Keys of a part that all algorithms have: their names do not tell the algorithm.
SHARED: dict[str, KindCase] = {
    "kl.coefficient": a_kl_term_is_weighted,
    "kl.estimator": a_kl_is_estimated,
    "kl.place": a_kl_has_its_place,
    "kl.importance_weighted": a_kl_gradient_is_weighted,
    "kl.target": a_kl_coefficient_adapts,
    "kl.horizon": a_kl_coefficient_takes_its_time,
    "dynamic_sampling.max_rounds": rounds_are_bounded,
    "overlong.type (keep)": partial(overlong_samples_are, how="keep"),
    "overlong.type (mask)": partial(overlong_samples_are, how="mask"),
    "overlong.type (shape)": partial(overlong_samples_are, how="shape"),
    "overlong.buffer_tokens (shape)": overlong_buffer,
    "overlong.penalty (shape)": overlong_penalty,
}

# Which algorithm has them makes no difference to the code, except where advantages are whitened.
IN_EVERY_RUN = ("grpo", "reinforce_pp")


def of_shared_keys(kinds: Sequence[str]) -> dict[str, Case]:
    return {
        f"algorithm.{key}": all_of(*(partial(check, kind=kind) for kind in kinds))
        for key, check in SHARED.items()
    }


CASES: dict[str, Case] = {
    **{
        f"algorithm.{key} ({kind})": partial(check, kind=kind)
        for key, check in TYPED.items()
        for kind in KINDS
    },
    **{
        f"algorithm.{key} ({kind})": partial(check, kind=kind) for key, (kind, check) in OWN.items()
    },
    **of_shared_keys(IN_EVERY_RUN),
}
# The same keys with the other algorithms, at night.
NIGHTLY_CASES = of_shared_keys(tuple(kind for kind in KINDS if kind not in IN_EVERY_RUN))
