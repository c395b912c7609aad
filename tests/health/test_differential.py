"""The differential: illnesses weighed by the signs that are present, absent and leading."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from homeostat.health.diagnose import Diagnosis
from homeostat.health.differential.answer import MIN_SHARE, differential
from homeostat.health.differential.deciding import DECIDERS, deciders
from homeostat.health.differential.illnesses import OTHER, Form, Table, Weights, fitted_table
from homeostat.health.differential.posterior import forms_posterior, illness_posterior, is_covered
from homeostat.health.differential.signs import Signs, signs_of
from homeostat.health.finding import Cause, Confidence, Family, Finding, Level
from homeostat.health.formats.as_json import as_json
from homeostat.health.formats.as_text import as_text
from homeostat.health.frameworks import ALL
from homeostat.health.frameworks.known import known
from homeostat.health.registry import BY_CODE, RETIRED
from homeostat.health.view import RunView
from homeostat.health.vocabulary import FAMILY_OF

SIGNS = ("AAA001", "AAA002", "AAA003")
# The first two share a sign; AAA003 tells them apart. The third has a sign of its own.
FORMS = {
    "hot": Form(("lr-too-high",), 10, {"AAA001": 10, "AAA002": 9}, {"AAA001": 10}),
    "batch": Form(("bad-batch",), 10, {"AAA001": 3, "AAA002": 10}, {"AAA002": 10}),
    "eos": Form(("no-eos", "truncation-at-cap"), 10, {"AAA003": 10}, {"AAA003": 10}),
}
TABLE = Table(FORMS, Weights(smoothing=2.0, sharpness=1.0, lead=1.0, other=0.1), {})


def finding(code: str, name: str, *causes: str) -> Finding:
    return Finding(
        code=code,
        name=name,
        family=Family.LEARNING,
        level=Level.WARN,
        confidence=Confidence.INFERRED,
        message="",
        causes=tuple(Cause(cause, "why") for cause in causes),
    )


def signs(*present: str, judged: tuple[str, ...] = SIGNS) -> Signs:
    return Signs(frozenset(present), present[0], frozenset(judged))


def test_the_posterior_is_bayes_rule_over_the_signs_that_were_judged() -> None:
    usual = {"AAA001": (1.3 + 0.25) / 8.0, "AAA002": (1.9 + 0.25) / 8.0}
    scores = {OTHER: 0.1 * (1 - usual["AAA001"]) * usual["AAA002"] * 10.5 / 31.5}
    for form in FORMS.values():
        share = {sign: (form.present.get(sign, 0) + 2 * p) / 12.0 for sign, p in usual.items()}
        leads = (form.leads.get("AAA002", 0) + 2 * 10.5 / 31.5) / 12.0
        scores[form.illness] = 0.3 * (1 - share["AAA001"]) * share["AAA002"] * leads
    total = sum(scores.values())
    assert illness_posterior(signs("AAA002", judged=("AAA001", "AAA002")), TABLE) == pytest.approx(
        {name: score / total for name, score in scores.items()}
    )


def test_a_sign_that_is_absent_speaks_against_what_always_causes_it() -> None:
    judged = illness_posterior(signs("AAA001", judged=("AAA001", "AAA002")), TABLE)
    not_judged = illness_posterior(signs("AAA001", judged=("AAA001",)), TABLE)
    assert judged["lr-too-high"] < not_judged["lr-too-high"]


def test_the_sign_that_leads_tells_which_of_two_illnesses_it_is() -> None:
    assert next(iter(illness_posterior(signs("AAA001", "AAA002"), TABLE))) == "lr-too-high"
    assert next(iter(illness_posterior(signs("AAA002", "AAA001"), TABLE))) == "bad-batch"


def test_forms_of_one_illness_are_added() -> None:
    twice = replace(TABLE, forms=FORMS | {"jump": FORMS["hot"]})
    seen = signs("AAA001", "AAA002")
    forms, shares = forms_posterior(seen, twice), illness_posterior(seen, twice)
    assert shares["lr-too-high"] == pytest.approx(float(forms[0] + forms[3]))
    assert sum(shares.values()) == pytest.approx(1.0)


def test_signs_are_findings_that_ask_for_action_and_rules_that_found_nothing() -> None:
    note = replace(finding("AAA003", "note"), level=Level.INFO)
    found = signs_of([finding("AAA002", "x"), finding("AAA001", "y"), note], clear=["BBB001"])
    assert found == Signs(
        frozenset({"AAA001", "AAA002"}), "AAA002", frozenset({"AAA001", "AAA002", "BBB001"})
    )


def test_there_is_no_probability_for_a_sign_that_the_clinic_never_saw_or_a_foreign_run() -> None:
    known, odd = finding("AAA002", "bad-batch"), finding("ZZZ001", "odd")
    ours = {"clear": SIGNS, "is_calibrated": True, "table": TABLE}
    found = differential([known], **ours)
    shares = illness_posterior(signs_of([known], clear=SIGNS), TABLE)
    assert {one.name: one.probability for one in found.illnesses} == {
        name: share for name, share in shares.items() if share >= MIN_SHARE
    }
    assert not differential([known, odd], **ours).illnesses
    assert not differential([known], **ours | {"is_calibrated": False}).illnesses


def test_what_decides_is_named_for_causes_of_any_run() -> None:
    cut = finding("GEN001", "truncation-at-cap", "truncation-at-cap", "no-eos", "task-too-hard")
    found = differential([cut], clear=(), is_calibrated=False, table=TABLE)
    assert [one.pair for one in found.deciders] == [
        {"truncation-at-cap", "no-eos"},
        {"truncation-at-cap", "task-too-hard"},
    ]
    view = RunView(framework=ALL["verl"])
    diagnosis = Diagnosis((cut,), (), (), found)
    told = as_json(diagnosis, view)["differential"]["deciders"][0]
    assert told["between"] == ["truncation-at-cap", "no-eos"]
    # A user of another framework is told its own setting.
    assert "rollout.max_new_tokens" not in told["how"]
    page = " ".join(as_text(diagnosis, view).split())
    assert "To tell truncation-at-cap from no-eos: double" in page


def test_probabilities_are_shown_in_text_and_json() -> None:
    known = finding("AAA002", "bad-batch")
    found = differential([known], clear=SIGNS, is_calibrated=True, table=TABLE)
    diagnosis = Diagnosis((known,), (), (), found)
    first = as_json(diagnosis, RunView())["differential"]["illnesses"][0]
    assert first == {"name": "bad-batch", "probability": round(found.illnesses[0].probability, 3)}
    percent = f"{100 * found.illnesses[0].probability:.0f} %"
    assert f"By all signs together: bad-batch {percent}" in as_text(diagnosis, RunView())


def test_the_fitted_table_speaks_of_known_illnesses_and_rules() -> None:
    table = fitted_table()
    assert {name for form in table.forms.values() for name in form.names} <= FAMILY_OF.keys()
    assert table.signs.keys() <= BY_CODE.keys() | RETIRED.keys()
    assert math.isclose(sum(illness_posterior(signs("LRN002"), table).values()), 1.0)
    assert is_covered(signs("LRN002"), table)


def test_deciders_are_of_known_illnesses_in_any_order() -> None:
    assert {name for one in DECIDERS for name in one.pair} <= FAMILY_OF.keys()
    assert next(deciders(["no-eos", "reward-slow", "truncation-at-cap"])).pair == {
        "no-eos",
        "truncation-at-cap",
    }
    assert not [one.how for one in DECIDERS if re.search(r"[.;:]$", one.how)]


def test_deciders_name_settings_that_exist() -> None:
    ours = re.compile(r"\b(?:algorithm|data|engine|observe|rollout|sync|trainer)\.[a-z_.]*[a-z]")
    keys = {key for one in DECIDERS for key in ours.findall(one.how)}
    assert keys
    assert not [key for key in keys if known("homeostat").spelling(key) is None]
