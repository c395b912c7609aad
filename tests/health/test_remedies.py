"""Remedies as data: every illness and key in the table exists, and edits move the right way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from homeostat.config import RunConfig
from homeostat.config.loading.schema import known_keys
from homeostat.health.diagnose import judge
from homeostat.health.finding import Cause, Confidence, Family, Finding, Grade, Level
from homeostat.health.own_guards import OWN_GUARDS
from homeostat.health.registry import BY_CODE
from homeostat.health.remedies import (
    CLIP_HIGHER,
    COOLER,
    EDITS,
    FEWER_UPDATES,
    GENTLE_FRESH_UPDATE,
    GENTLE_UPDATE,
    LR,
    LR_BY_EXCESS,
    LR_FAR_LOWER,
    MORE_KL,
    OFF_POLICY_MASK,
    SYNC_OFTENER,
    TABLE,
    WARMER,
    Signs,
    is_better,
    remedies_for,
)
from homeostat.health.view import Kind, RunView, Series
from homeostat.health.vocabulary import FAMILY_OF
from homeostat.observe.events import EVENTS
from homeostat.observe.names import describe

ALL = [remedy for remedies in TABLE.values() for remedy in remedies]


def a_finding(name: str, *causes: str, level: Level = Level.WARN) -> Finding:
    return Finding(
        code="POL900",
        name=name,
        family=Family.POLICY,
        level=level,
        confidence=Confidence.INFERRED,
        message="",
        causes=tuple(Cause(cause, "") for cause in causes),
    )


def test_every_illness_key_and_metric_of_the_table_exists() -> None:
    assert TABLE.keys() <= FAMILY_OF.keys()
    assert {remedy.metric for remedy in ALL if describe(remedy.metric) is None} == set()
    assert {edit.path for edit in EDITS} <= set(known_keys(RunConfig))
    assert {remedy.edit for remedy in ALL if remedy.edit is not None} == set(EDITS)
    assert OWN_GUARDS.keys() <= EVENTS.keys()


def test_what_changes_how_a_run_learns_is_not_called_safe() -> None:
    for remedy in ALL:
        assert (remedy.edit is None) or remedy.grade is Grade.UNSAFE
        assert remedy.action is not None or remedy.edit is not None
        assert remedy.window >= 1


@pytest.mark.parametrize(
    ("edit", "old", "new"),
    [
        (LR, 1e-3, 5e-4),
        (LR, 0.0, None),
        (CLIP_HIGHER, 0.2, 0.28),
        (MORE_KL, 0.001, 0.003),
        (MORE_KL, None, None),
        (WARMER, 0.6, 0.8),
        (WARMER, 0.95, 1.0),
        (WARMER, 0.02, 1.0),
        (WARMER, 1.0, None),
        (WARMER, 1.4, None),
        (COOLER, 1.4, 1.2),
        (COOLER, 1.05, 1.0),
        (COOLER, 0.6, None),
        (LR_FAR_LOWER, 1e-3, 1e-4),
        (FEWER_UPDATES, 8, 4),
        (FEWER_UPDATES, 1, None),
        (SYNC_OFTENER, 8, 4),
        (SYNC_OFTENER, 1, None),
        (OFF_POLICY_MASK, None, 0.5),
        (OFF_POLICY_MASK, 0.1, None),
    ],
)
def test_an_edit_is_a_function_of_the_present_value(edit, old, new) -> None:
    found = edit.new_value(old, Signs(a_finding("x"), {}))
    assert found == (None if new is None else pytest.approx(new))


def series(*pairs: tuple[int, float]) -> Series:
    return Series(np.array([step for step, _ in pairs]), np.array([value for _, value in pairs]))


def moved(*pairs: tuple[int, float], lr: float) -> dict[str, Series]:
    rates = series(*((step, lr) for step, _ in pairs))
    return {"learning_rate": rates, "update/weight_ratio/head": series(*pairs)}


def test_a_rate_shrinks_by_what_it_moved_the_weights_too_far() -> None:
    finding = replace(a_finding("lr-too-high"), first_step=12)
    signs = Signs(finding, moved((10, 0.3), (11, 0.002), lr=1e-3))
    # 0.3 of the weights after it are 0.3145 of those before.
    assert LR_BY_EXCESS.new_value(1e-3, signs) == pytest.approx(1e-3 * GENTLE_UPDATE / 0.3145, 1e-3)
    fresh = replace(signs, is_fresh=True)
    assert LR_BY_EXCESS.new_value(1e-3, fresh) == pytest.approx(
        1e-3 * GENTLE_FRESH_UPDATE / 0.3145, 1e-3
    )
    # Half of the rate was in force when it was measured, as in a warm-up.
    warm = Signs(finding, moved((10, 0.3), lr=5e-4))
    assert LR_BY_EXCESS.new_value(1e-3, warm) == pytest.approx(5e-4 * GENTLE_UPDATE / 0.3145, 1e-3)
    # What was long before the illness says nothing about it; nor does a gentle update.
    for pairs in ((1, 0.9), (11, 0.009)):
        signs = Signs(finding, moved(pairs, lr=1e-3))
        assert LR_BY_EXCESS.new_value(1e-3, signs) == pytest.approx(5e-4)
        assert LR_FAR_LOWER.new_value(1e-3, signs) == pytest.approx(1e-4)


def test_an_update_of_all_of_the_weights_is_finite() -> None:
    signs = Signs(a_finding("lr-too-high"), moved((1, 1.0), (2, float("nan")), lr=1.0))
    new = LR_BY_EXCESS.new_value(1.0, signs)
    assert type(new) is float
    assert 1e-4 <= new < 1e-3


def test_a_penalty_grows_until_it_weighs_beside_the_reward() -> None:
    signs = Signs(a_finding("kl-runaway"), {"kl": series((1, 0.1), (2, 2.0))})
    assert MORE_KL.new_value(0.01, signs) == pytest.approx(0.1)
    assert MORE_KL.new_value(1e-5, signs) == pytest.approx(0.1)
    assert MORE_KL.new_value(0.1, signs) == pytest.approx(0.3)


def test_weights_are_published_oftener_by_what_they_are_too_old() -> None:
    signs = Signs(replace(a_finding("stale-policy"), value=1.5, limit=0.3), {})
    assert SYNC_OFTENER.new_value(20, signs) == 4
    assert SYNC_OFTENER.new_value(3, signs) == 1


def test_the_rate_of_weights_drawn_at_random_is_not_lowered_for_large_updates_alone() -> None:
    steps = np.arange(1, 9)
    metrics = {"update/weight_ratio/head": Series(steps, np.full(8, 0.5))}
    for init, level in (("random", Level.INFO), ("weights", Level.WARN)):
        view = RunView(metrics=metrics, kind=Kind.SFT, settings={"model.init": init})
        (finding,) = judge(BY_CODE["NUM008"], view)
        assert finding.level is level
        assert bool(list(remedies_for(finding))) == (init == "weights")


def test_the_first_cause_comes_before_the_symptom() -> None:
    names = [r.name for r in remedies_for(a_finding("entropy-explosion", "lr-too-high"))]
    assert names[1:3] == ["lr-to-limit", "halve-lr"]
    assert len(names) == len(TABLE["lr-too-high"]) + len(TABLE["entropy-explosion"])
    assert len(set(names)) < len(names)


def test_what_holds_or_restores_the_weights_comes_before_the_cause() -> None:
    runaway = remedies_for(a_finding("kl-runaway", "lr-too-high"))
    assert next(runaway).name == "more-kl"
    collapsed = remedies_for(a_finding("policy-collapse", "too-many-updates-per-rollout"))
    assert [remedy.name for remedy in collapsed] == ["roll-back", "fewer-updates", "halve-lr"]


def test_information_needs_no_cure() -> None:
    assert list(remedies_for(a_finding("kl-runaway", level=Level.INFO))) == []
    assert list(remedies_for(a_finding("no-such-illness"))) == []


def test_better_is_more_than_chance() -> None:
    assert is_better(10.0, 5.0, better="lower")
    assert not is_better(10.0, 9.5, better="lower")
    assert is_better(-1.0, -0.5, better="higher")
    assert not is_better(None, 1.0, better="higher")
    assert not is_better(1.0, float("nan"), better="higher")


def test_a_guard_is_told_as_the_remedy_that_it_is() -> None:
    guard = OWN_GUARDS["oom_retry"]
    told = guard.described({"tokens_before": 8, "tokens_now": 4, "error": "no memory"})
    assert (told["remedy"], told["old"], told["new"]) == ("retry_smaller", 8, 4)
    assert "no memory" in told["cause"]
    reward = OWN_GUARDS["reward_trouble"]
    assert reward.applies({"failure": "worker_died"})
    assert not reward.applies({"failure": "exception"})
