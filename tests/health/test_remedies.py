"""Remedies as data: every illness and key in the table exists, and edits move the right way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from homeostat.config import RunConfig
from homeostat.config.schema import known_keys
from homeostat.health.finding import Cause, Confidence, Family, Finding, Grade, Level
from homeostat.health.remedies import (
    CLIP_HIGHER,
    EDITS,
    LR,
    LR_BY_EXCESS,
    MORE_KL,
    OFF_POLICY_MASK,
    OWN_GUARDS,
    SYNC_OFTENER,
    TABLE,
    TEMPERATURE,
    is_better,
    remedies_for,
    times_over,
)
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
        (MORE_KL, 0.001, 0.002),
        (MORE_KL, None, None),
        (TEMPERATURE, 0.6, 0.8),
        (TEMPERATURE, 1.4, 1.2),
        (TEMPERATURE, 1.05, 1.0),
        (TEMPERATURE, 1.0, None),
        (SYNC_OFTENER, 8, 4),
        (SYNC_OFTENER, 1, None),
        (OFF_POLICY_MASK, None, 0.5),
        (OFF_POLICY_MASK, 0.1, None),
    ],
)
def test_an_edit_is_a_function_of_the_present_value(edit, old, new) -> None:
    assert edit.change(old, 1.0) == (None if new is None else pytest.approx(new))


def test_steps_that_are_too_large_shrink_by_what_they_are_too_large() -> None:
    finding = replace(a_finding("update-too-large"), value=3.0, limit=0.1)
    assert LR_BY_EXCESS.change(3e-3, times_over(finding)) == pytest.approx(1e-4)
    assert LR_BY_EXCESS.change(3e-3, times_over(replace(finding, name="x"))) == pytest.approx(
        1.5e-3
    )


def test_the_first_cause_comes_before_the_symptom() -> None:
    names = [r.name for r in remedies_for(a_finding("policy-collapse", "lr-too-high"))]
    assert names[1:3] == ["lr-to-limit", "halve-lr"]
    assert len(names) == len(TABLE["lr-too-high"]) + len(TABLE["policy-collapse"])
    assert len(set(names)) < len(names)


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
