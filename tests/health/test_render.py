"""What a program and a person get to see of a diagnosis."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from homeostat.health.diagnose import Diagnosis
from homeostat.health.finding import (
    Cause,
    Confidence,
    Family,
    Finding,
    Fix,
    Grade,
    Level,
    NotEvaluated,
)
from homeostat.health.formats.as_json import Verdict, as_json, in_their_words, verdict
from homeostat.health.formats.as_text import as_text
from homeostat.health.frameworks import ALL, UNKNOWN
from homeostat.health.log import Log, LogLine
from homeostat.health.view import Kind, RunView, Series

FINDING = Finding(
    code="GEN001",
    name="truncation-at-cap",
    family=Family.GENERATION,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    message="93% of the completions are cut at the limit since step 1,204 (limit 80%).",
    evidence=("completions/clipped_ratio 0.93", "a quoted \x1b[2J line\twith control characters"),
    causes=(Cause("truncation-at-cap", "they reach 512 tokens"), Cause("no-eos", "none ends")),
    fixes=(
        Fix("rollout.max_new_tokens", "2048", "room to finish", Grade.UNSAFE),
        Fix("", "look at completions", "see whether they end", Grade.ADVICE),
        Fix("observe.verify_logprobs", "on", "says which side is off", Grade.SAFE),
    ),
    first_step=1204,
    last_step=1300,
    value=0.93,
    limit=0.8,
)
NOTE = Finding(
    "LRN009", "benign-grpo-loss-zero", Family.LEARNING, Level.INFO, Confidence.INFERRED, "fine"
)
MISSING = (
    NotEvaluated("RWD001", "zero-std-groups", "the metric reward_std was not logged"),
    NotEvaluated("CFG001", "group-size-one", "the setting rollout.samples_per_prompt is not known"),
)


def view(*, framework: str = "verl", log: tuple[str, ...] = (), metrics: bool = True) -> RunView:
    series = Series(np.arange(1, 4), np.array([0.1, 0.2, 0.3]))
    return RunView(
        metrics={"reward": series, "grad_norm": series} if metrics else {},
        framework=ALL[framework],
        kind=Kind.RL,
        log=Log([LogLine(number, text, 3) for number, text in enumerate(log, start=1)]),
        total_steps=3000,
    )


def ill(*findings: Finding) -> Diagnosis:
    return Diagnosis(findings, MISSING, ("NUM001",) * 40)


def test_json_has_the_promised_fields_and_their_settings_names() -> None:
    found = as_json(ill(FINDING), view())
    assert list(found) == [
        "healthy",
        "verdict",
        "framework",
        "files",
        "vital_signs",
        "reading",
        "findings",
        "differential",
        "not_evaluated",
    ]
    assert (found["healthy"], found["framework"]) == (False, "verl")
    [one] = found["findings"]
    assert set(one) == {
        "code", "name", "family", "level", "confidence", "first_step", "last_step", "subject",
        "value", "limit", "message", "evidence", "causes", "fixes",
    }  # fmt: skip
    assert one["fixes"] == [
        {
            "setting": "data.max_response_length",
            "value": "2048",
            "advice": "",
            "why": "room to finish",
            "grade": "unsafe",
        },
        {
            "setting": None,
            "value": "",
            "advice": "look at completions",
            "why": "see whether they end",
            "grade": "advice",
        },
    ], "nothing is said of what verl does not have"
    assert found["not_evaluated"][0] == {
        "code": "RWD001",
        "name": "zero-std-groups",
        "why": "the metric reward_std was not logged",
    }


def test_json_is_strict_where_values_are_not_finite() -> None:
    import dataclasses

    odd = dataclasses.replace(FINDING, value=float("nan"), limit=float("-inf"))
    found = json.loads(json.dumps(as_json(ill(odd), view()), allow_nan=False))
    assert (found["findings"][0]["value"], found["findings"][0]["limit"]) == ("nan", "-inf")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_text_fits_the_terminal_and_does_not_steer_it(width: int) -> None:
    text = as_text(ill(FINDING, NOTE), view(), width=width, verbose=True)
    assert max(map(len, text.splitlines())) <= max(width, 40)
    assert all(char == "\n" or char.isprintable() for char in text)
    assert "\\x1b[2J" in text


def test_text_says_the_verdict_the_cause_and_their_setting() -> None:
    text = as_text(ill(FINDING, NOTE), view())
    lines = text.splitlines()
    assert lines[0].startswith("Read: verl, reinforcement learning, step 3 of 3,000")
    assert lines[1] == "ILL: 1 error, 1 note. Most likely illness first."
    assert "1. error GEN001 truncation-at-cap" in lines
    assert "   generation, measured, since step 1,204" in lines
    assert "     1. truncation-at-cap: they reach 512 tokens" in lines
    assert "     - data.max_response_length = 2048: room to finish [changes how the run" in lines
    assert "     - look at completions: see whether they end" in lines
    assert "verify logprobs" not in text, "verl has no such setting"
    tail = (
        "2 rules could not be evaluated (1: metric not logged; 1: setting not known (--config)). "
        "--verbose lists them."
    )
    assert " ".join(text.split()).endswith(tail)
    assert "RWD001" not in text
    assert "RWD001 zero-std-groups: the metric" in as_text(ill(FINDING), view(), verbose=True)


def test_colours_are_there_only_when_asked_for() -> None:
    assert "\033[" not in as_text(ill(FINDING), view())
    assert "\033[1;31m1. error GEN001 truncation" in as_text(ill(FINDING), view(), color=True)


def test_findings_of_a_lower_level_are_counted_when_left_out() -> None:
    text = as_text(ill(FINDING, NOTE), view(), findings=[FINDING])
    assert "LRN009" not in text
    assert "1 finding of a lower level not shown" in text


def test_a_clear_run_is_called_clear_and_an_unread_one_unknown() -> None:
    clear = as_text(ill(NOTE), dataclasses.replace(view(), total_steps=3))
    assert "NO ILLNESS FOUND." in clear
    unfinished = as_text(ill(NOTE), view())
    assert "UNFINISHED: no illness so far, but the run did not reach its end." in unfinished
    assert "NO ILLNESS FOUND" not in unfinished
    unknown = as_text(ill(), view(metrics=False, log=("hello",)))
    assert "NOT KNOWN" in unknown
    assert "I do not know this. No rule matches: " in " ".join(unknown.split())
    assert "2 rules could not be evaluated (" in " ".join(unknown.split())
    assert "framework not recognised" in as_text(ill(), view(framework=UNKNOWN.name))


TRACE = (
    "(TaskRunner pid=3) Traceback (most recent call last):",
    '(TaskRunner pid=3)   File "train.py", line 3, in main',
    "(TaskRunner pid=3)     step()",
    "(TaskRunner pid=3) FlurbError: the gizmo is out of flurb",
)


def test_an_end_that_no_rule_knows_is_neither_healthy_nor_guessed_at() -> None:
    odd = view(log=TRACE)
    assert verdict(ill(), odd) is Verdict.NOT_KNOWN
    text = as_text(ill(), odd)
    assert "NOT KNOWN: the log ends in an error that no rule knows." in text
    assert "line 4: (TaskRunner pid=3) FlurbError: the gizmo is out of flurb" in text
    first = as_json(ill(), odd)["not_evaluated"][0]
    assert (first["code"], first["name"]) == ("ERR000", "unknown-error")
    assert "FlurbError" in first["why"]


def test_an_error_that_was_survived_or_is_explained_is_no_unknown_end() -> None:
    log = (*TRACE, *(f"step {n} is done" for n in range(60)))
    survived = dataclasses.replace(view(log=log), total_steps=3)
    assert verdict(ill(), survived) is Verdict.NO_ILLNESS
    assert as_json(ill(FINDING), view(log=TRACE))["not_evaluated"][0]["code"] == "RWD001"


def test_settings_in_sentences_are_called_what_the_framework_calls_them() -> None:
    text = "Raise rollout.max_new_tokens or observe.verify_logprobs; see trainer.py."
    theirs = "Raise data.max_response_length or verify logprobs; see trainer.py."
    assert in_their_words(text, ALL["verl"]) == theirs
    assert in_their_words(text, ALL["homeostat"]) == text


def test_an_end_that_a_finding_quotes_is_not_quoted_twice() -> None:
    quotes = dataclasses.replace(FINDING, evidence=(f"line 4: {TRACE[3]}",))
    text = as_text(ill(quotes), view(log=TRACE))
    assert "Vital signs: it ended in an exception (line 4)" in text
    assert text.count("out of flurb") == 1
    other = dataclasses.replace(FINDING, evidence=())
    assert "line 4): FlurbError" in as_text(ill(other), view(log=TRACE), width=110)


def test_a_run_that_died_before_its_first_record_is_not_asked_for_metrics() -> None:
    text = as_text(ill(FINDING), view(metrics=False, log=TRACE))
    assert "not logged:" not in text
    assert "vital signs are logged" not in text
    assert "vital signs are logged" in as_text(ill(FINDING), view(log=TRACE))


def test_guesses_are_no_causes() -> None:
    causes = (Cause("truncation-at-cap", "they reach it"), Cause("no-eos", "a guess", guess=0.15))
    text = as_text(ill(dataclasses.replace(FINDING, causes=causes)), view())
    sure, _, guessed = text.partition("   Guesses, from similar errors of others\n")
    assert "1. truncation-at-cap: they reach it" in sure
    assert "- no-eos: a guess" in guessed
    assert "no-eos" not in sure


def test_known_texts_are_only_claimed_where_a_text_was_read() -> None:
    assert "known error texts" not in as_text(ill(), view(metrics=False))
    read = Diagnosis((), MISSING, ("NUM001", "ERR001"))
    assert "known error texts" in as_text(read, view(metrics=False, log=("hello",)))


def test_an_inferred_cause_of_an_error_says_how_often_it_is_right() -> None:
    by_metrics = dataclasses.replace(FINDING, confidence=Confidence.INFERRED)
    by_text = dataclasses.replace(by_metrics, code="ERR424")
    assert by_text.certainty == "inferred (right in about 85% of cases)"
    assert by_metrics.certainty == "inferred"
    assert dataclasses.replace(FINDING, code="ERR424").certainty == "measured"
    for found in (by_text, by_metrics):
        diagnosis = Diagnosis((found,), (), ())
        assert found.certainty in " ".join(as_text(diagnosis, view(), width=100).split())
