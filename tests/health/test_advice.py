"""Advice that a run follows already is never given, by any rule."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.health.markdown import Case, by_letters, named
from tests.health.test_rules import CASES

from homeostat.health.advice import is_followed
from homeostat.health.diagnose import judge
from homeostat.health.finding import Fix, NotEvaluated
from homeostat.health.registry import BY_CODE
from homeostat.health.view import RunView

FIRING = by_letters(case for case in CASES if case.title.startswith("Fires"))


@pytest.mark.parametrize(
    ("setting", "wanted", "settings", "followed"),
    [
        ("rollout.temperature", "1.0", {"rollout.temperature": 1.0}, True),
        ("rollout.temperature", "1.0", {"rollout.temperature": "1"}, True),
        ("rollout.temperature", "1.0", {"rollout.temperature": 0.6}, False),
        ("rollout.temperature", "1.0", {}, False),
        ("algorithm.dynamic_sampling", "on", {"algorithm.dynamic_sampling.max_rounds": 8}, True),
        ("algorithm.dynamic_sampling", "on", {"algorithm.dynamic_sampling": True}, True),
        ("algorithm.dynamic_sampling", "on", {"algorithm.dynamic_sampling": None}, False),
        ("algorithm.correction.weight", "token", {"algorithm.correction.weight.type": "token"},
         True),
        ("algorithm.kl.coefficient", "0.001 or more", {"algorithm.kl.coefficient": 0.01}, True),
        ("algorithm.kl.coefficient", "0.001 or more", {"algorithm.kl.coefficient": 0.0}, False),
        ("rollout.samples_per_prompt", "16", {"rollout.samples_per_prompt": 32}, True),
        ("trainer.max_grad_norm", "1.0", {"trainer.max_grad_norm": 0.5}, True),
        ("trainer.max_grad_norm", "1.0", {"trainer.max_grad_norm": 0.0}, False),
        ("trainer.lr", "a half to a fifth", {"trainer.lr": 1e-3}, False),
        ("lora.dropout", "0", {"lora.dropout": 0}, True),
        ("", "look at completions", {}, False),
    ],
)  # fmt: skip
def test_what_counts_as_followed(
    setting: str, wanted: str, settings: dict[str, object], followed: bool
) -> None:
    assert is_followed(Fix(setting, wanted, "why"), RunView(settings=settings)) is followed


@pytest.mark.parametrize("letters", FIRING)
def test_no_rule_advises_what_the_run_has(letters: str) -> None:
    for case in FIRING[letters]:
        with named(f"{case.code} {case.title}"):
            _advises_nothing_known(case)


def _advises_nothing_known(case: Case) -> None:
    view, rule = case.view(), BY_CODE[case.code]
    advised = {(fix.setting, fix.value) for fix in _fixes(case, view)}
    for setting, value in advised:
        if " " in value:
            # Words, not a value: "twice as long".
            continue
        settings = {**view.settings, setting: value}
        again = _fixes(case, dataclasses.replace(view, settings=settings))
        assert (setting, value) not in {(fix.setting, fix.value) for fix in again} or not setting, (
            rule.code
        )


def _fixes(case: Case, view: RunView) -> list[Fix]:
    with np.errstate(all="ignore"):
        found = judge(BY_CODE[case.code], view, options=case.about.get("options", {}))
    return [] if isinstance(found, NotEvaluated) else [fix for f in found for fix in f.fixes]
