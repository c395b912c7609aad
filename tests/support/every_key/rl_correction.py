"""Cases of algorithm.correction, on rollouts of another model: ratios are from 0.26 to 2.4.

Bounds at 1e6 and 1e-6 are as good as none. No row is left out for its advantage, so that shares are
of all 16 completions.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from tests.support.every_key.rl_workshop import SAVED, only
from tests.support.every_key.workshop import Case, Run, Workshop, all_of, assert_same, weight_bytes

from homeostat.errors import ConfigError

OTHERS = (*SAVED, "debug.rollouts=runs/sampled_other", "algorithm.skip_zero_advantage=false")
LEVELS = ("token", "sequence", "geometric")
# Inside the range of the ratios; and as wide as a level allows.
NARROW = {"token": (0.8, 1.2), "sequence": (0.7, 1.3), "geometric": (0.95, 1.05)}
WIDE = {"token": (1e-6, 1e6), "sequence": (1e-6, 1e6), "geometric": (0.67, 1.5)}
MEAN_RATIO = "sampling/importance_sampling_ratio/mean"


def corrected(workshop: Workshop, settings: str, *changes: str) -> Run:
    return workshop.run(*OTHERS, f"algorithm.correction={{{settings}}}", *changes)


def uncorrected(workshop: Workshop) -> Run:
    return workshop.run(*OTHERS, "algorithm.correction=null")


def refused(workshop: Workshop, settings: str, why: str, *, kind: str = "grpo") -> None:
    with pytest.raises(ConfigError, match=why):
        workshop.config(*OTHERS, f"algorithm={{type: {kind}, correction: {{{settings}}}}}")


def share(run: Run, part: str) -> tuple[float, float]:
    return only(f"correction/tokens/{part}", run), only(f"correction/sequences/{part}", run)


def weight(level: str, *, low: float | None = None, high: float, outside: str = "truncate") -> str:
    bound = "null" if low is None else low
    return f"weight: {{type: {level}, low: {bound}, high: {high}, outside: {outside}}}"


def reject(level: str, low: float, high: float) -> str:
    return f"weight: null, reject: {{type: {level}, low: {low}, high: {high}}}"


# The weight.


def a_weight_is_of_its_level(workshop: Workshop, *, level: str) -> None:
    runs = {each: corrected(workshop, weight(each, high=WIDE[each][1])) for each in LEVELS}
    found = {each: only("correction/factor_mean", run) for each, run in runs.items()}
    assert len({round(value, 5) for value in found.values()}) == 3
    assert all(only("correction/tokens/truncated", run) == 0 for run in runs.values())
    if level == "token":
        assert found["token"] == pytest.approx(only(MEAN_RATIO, runs["token"]), rel=1e-6)
    else:
        # A token's weight is its row's, so that a bound holds whole rows.
        tight = corrected(workshop, weight(level, high=NARROW[level][1]))
        tokens, sequences = share(tight, "truncated")
        assert (sequences * 16) == round(sequences * 16) > 0
        assert tokens > 0
    plain = weight_bytes(uncorrected(workshop))
    assert all(weight_bytes(run) != plain for run in runs.values())


def a_weight_has_bounds(workshop: Workshop, *, level: str, side: str) -> None:
    low, high = NARROW[level]
    widest = WIDE[level][1]
    loose = weight(level, high=widest)
    tight = weight(level, high=high) if side == "high" else weight(level, low=low, high=widest)
    before, after = (corrected(workshop, settings) for settings in (loose, tight))
    assert share(before, "truncated") == (0, 0) < share(after, "truncated")
    factors = [only("correction/factor_mean", run) for run in (before, after)]
    assert (factors[1] < factors[0]) == (side == "high")
    assert weight_bytes(before) != weight_bytes(after)
    crossed = weight(level, low=1.2, high=1.1)
    refused(workshop, crossed, "is not below high")
    refused(workshop, weight(level, high=0.9), "and 1 is outside these bounds")


def a_weight_outside_is_cut_or_0(workshop: Workshop, *, level: str) -> None:
    low, high = NARROW[level]
    cut, gone = (
        corrected(workshop, weight(level, low=low, high=high, outside=outside))
        for outside in ("truncate", "mask")
    )
    assert share(cut, "truncated") == share(gone, "masked") > (0, 0)
    assert only("correction/factor_mean", gone) < only("correction/factor_mean", cut)
    assert weight_bytes(gone) != weight_bytes(cut)


# What is left out.


def rejection_is_of_its_level(workshop: Workshop, *, level: str) -> None:
    runs = {each: corrected(workshop, reject(each, *NARROW[each])) for each in LEVELS}
    shares = {each: share(run, "rejected") for each, run in runs.items()}
    assert len(set(shares.values())) == 3
    tokens, sequences = shares[level]
    assert 0 < tokens < 1
    assert 0 < sequences < 1
    # What stays has weight 1.
    assert only("correction/factor_mean", runs[level]) == pytest.approx(1 - tokens, rel=1e-6)


def rejection_has_bounds(workshop: Workshop, *, level: str, side: str) -> None:
    (low, high), (lowest, highest) = NARROW[level], WIDE[level]
    bounds = (low, highest) if side == "low" else (lowest, high)
    few, more = (corrected(workshop, reject(level, *each)) for each in ((lowest, highest), bounds))
    assert share(few, "rejected") < share(more, "rejected")
    assert weight_bytes(few) != weight_bytes(more)
    # A completion of one token may be beyond what a geometric mean is allowed.
    if level != "geometric":
        assert share(few, "rejected") == (0, 0)
        assert_same(few, uncorrected(workshop))


def one_token_is_enough_for_a_veto(workshop: Workshop) -> None:
    none, half = (corrected(workshop, f"weight: null, veto: {at}") for at in (1e-6, 0.5))
    assert share(none, "vetoed") == (0, 0)
    assert_same(none, uncorrected(workshop))
    tokens, sequences = share(half, "vetoed")
    assert 0 < sequences < 1
    assert only("correction/factor_mean", half) == pytest.approx(1 - tokens, rel=1e-6)
    refused(workshop, "veto: 1.0", "less than 1")


def old_bad_answers_are_left_out(workshop: Workshop) -> None:
    none, some = (corrected(workshop, f"weight: null, off_policy_mask: {at}") for at in (9.0, 0.01))
    assert share(none, "off_policy") == (0, 0) < share(some, "off_policy") < (1, 1)
    assert_same(none, uncorrected(workshop))
    assert weight_bytes(none) != weight_bytes(some)


def weights_have_mean_1(workshop: Workshop) -> None:
    # Two rows to a micro-batch: a mean of each would be another.
    for more in ((), ("trainer.packing=false", "trainer.micro_batch_rows=2")):
        plain, divided = (
            corrected(workshop, f"{weight('token', high=1e6)}, normalise: {on}", *more)
            for on in ("false", "true")
        )
        mean = only(MEAN_RATIO, plain)
        assert only("correction/factor_mean", plain) == pytest.approx(mean, rel=1e-6)
        assert only("correction/factor_mean", divided) == pytest.approx(1, rel=1e-6)
        norms = [only("grad_norm", run) for run in (plain, divided)]
        assert norms[1] == pytest.approx(norms[0] / mean, rel=1e-5)
        assert abs(mean - 1) > 0.01
    refused(workshop, "weight: null, veto: 0.1, normalise: true", "divides the weights")


def what_cannot_be_meant_is_refused(workshop: Workshop) -> None:
    refused(workshop, "weight: null", "would correct nothing")
    for settings in (weight("geometric", high=2.0), reject("geometric", 0.5, 1.01)):
        refused(workshop, settings, "a bound for single tokens")
    for settings in (weight("token", high=2.0), reject("token", 0.5, 2.0)):
        refused(workshop, settings, "one ratio per completion", kind="gspo")


def the_default_is_safe_and_changes_nothing_on_policy(workshop: Workshop) -> None:
    """Sampled by the same weights: not a token is cut, and the update is the same to rounding."""
    saved = (*SAVED, "algorithm.skip_zero_advantage=false")
    default, off = (workshop.run(*saved, *more) for more in ((), ("algorithm.correction=null",)))
    assert share(default, "truncated") == (0, 0)
    for name, tensor in default.weights().items():
        np.testing.assert_allclose(tensor, off.weights()[name], atol=2e-5)


PART = "algorithm.correction"
CASES: dict[str, Case] = {
    **{
        f"{PART}.weight.{key} ({level})": partial(check, level=level)
        for key, check in (
            ("type", a_weight_is_of_its_level),
            ("low", partial(a_weight_has_bounds, side="low")),
            ("high", partial(a_weight_has_bounds, side="high")),
            ("outside", a_weight_outside_is_cut_or_0),
        )
        for level in LEVELS
    },
    **{
        f"{PART}.reject.{key} ({level})": partial(check, level=level)
        for key, check in (
            ("type", rejection_is_of_its_level),
            ("low", partial(rejection_has_bounds, side="low")),
            ("high", partial(rejection_has_bounds, side="high")),
        )
        for level in LEVELS
    },
    f"{PART}.veto": all_of(one_token_is_enough_for_a_veto, what_cannot_be_meant_is_refused),
    f"{PART}.off_policy_mask": old_bad_answers_are_left_out,
    f"{PART}.normalise": all_of(
        weights_have_mean_1, the_default_is_safe_and_changes_nothing_on_policy
    ),
}
