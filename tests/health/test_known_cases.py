"""Errors that no rule knows are guessed from the known ones nearest to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.health.test_exceptions_read import FRAMES, HEAD

from homeostat.cli.threads import KNOWN, known_text
from homeostat.health.diagnose import diagnose
from homeostat.health.finding import Confidence, Family, Finding, Level
from homeostat.health.formats.as_json import as_json
from homeostat.health.guesses import known_cases, second_opinion
from homeostat.health.guesses.known_cases import (
    Guess,
    KnownCase,
    guesses,
    leaving_out,
    telling_lines,
)
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES, SIGNATURES

ROOT = Path(__file__).resolve().parents[2]
FLURB = "https://github.com/owner/flurb/issues/1"
GIZMO = "https://github.com/owner/gizmo/issues/2"
FLURBED = "FlurbError: this flurb is out of glorp"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the known threads by two."""
    cases = (
        KnownCase(FLURB, ("dtype-mismatch",), "FlurbError: the flurb is out of glorp", "Cast it."),
        KnownCase(GIZMO, ("known-bad-version",), "GizmoError: gizmo has no whirl", "Upgrade."),
    )
    monkeypatch.setattr(known_cases, "known_cases", lambda: cases)
    caches = known_cases._index, known_cases._in_advance
    for cached in caches:
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


def first_finding(text: str) -> dict[str, Any]:
    view = read_text(text)
    return as_json(diagnose(view, RULES), view)["findings"][0]


def test_the_file_holds_the_open_half() -> None:
    assert (ROOT / KNOWN).read_text(encoding="utf-8") == known_text(ROOT), "run `make docs`"


def test_a_near_error_names_its_cause_its_thread_and_what_helped() -> None:
    (guess, *_) = guesses(["starting", FLURBED])
    assert guess.cause == "dtype-mismatch"
    assert guess.case is not None
    assert guess.case.url == FLURB
    found = first_finding("\n".join([HEAD, *FRAMES, FLURBED]))
    assert (found["code"], found["level"]) == ("VIT002", "warn")
    assert found["causes"][0]["name"] == "dtype-mismatch"
    assert "a guess, right in about" in found["causes"][0]["why"]
    assert any("Cast it." in fix["why"] and FLURB in fix["why"] for fix in found["fixes"])


def test_all_kinds_of_versions_are_one_cause() -> None:
    assert guesses(["GizmoError: the gizmo has no whirl"])[0].cause == known_cases.VERSIONS


def test_threads_of_the_repository_that_is_judged_are_left_out() -> None:
    with leaving_out(f"{FLURB}#a-comment"):
        guess = guesses([FLURBED])[0]
    assert guess.case is None or guess.case.url != FLURB
    assert guesses([FLURBED])[0].case is not None


def test_words_that_are_near_to_nothing_get_no_warning() -> None:
    found = first_finding("\n".join([HEAD, "ZorkError: qwx zzyq"]))
    assert (found["code"], found["level"]) == ("VIT002", "info")
    assert all(one.case is None for one in guesses(["ZorkError: qwx zzyq"]))


def test_a_librarys_unknown_error_is_most_often_a_version() -> None:
    found = first_finding("\n".join([HEAD, *FRAMES, "ZorkError: qwx zzyq"]))
    assert (found["code"], found["level"]) == ("VIT002", "warn")
    assert found["causes"][0]["guess"] >= 0.5


def test_a_guess_comes_before_a_loose_reading_of_the_words() -> None:
    error = f"{FLURBED}, flurbs are not available"
    found = first_finding("\n".join([HEAD, *FRAMES, error]))
    names = [cause["name"] for cause in found["causes"]]
    assert names[:2] == ["dtype-mismatch", "settings-exclusive"]


def test_a_guess_about_the_users_own_code_is_no_warning() -> None:
    cut = ['  File "/data/a/attend.py", line 84, in forward', "    raise FlurbError(", FLURBED]
    found = first_finding("\n".join(cut))
    assert (found["code"], found["level"]) == ("VIT002", "info")
    assert found["causes"][0]["name"] == "dtype-mismatch"


def test_a_guess_is_marked_in_the_json() -> None:
    found = first_finding("\n".join([HEAD, *FRAMES, FLURBED]))
    assert 0 < found["causes"][0]["guess"] < 1
    read = first_finding("ValueError: no backend is given: backend must not be None")
    assert read["causes"][0].keys() == {"name", "why"}


def test_what_only_says_that_something_failed_gets_guesses_last() -> None:
    body = f'{HEAD}\n  File "train.py", line 5, in <module>\n    step()\n'
    found = first_finding(body + FLURBED)
    assert (found["code"], found["level"]) == ("VIT006", "error")
    names = [cause["name"] for cause in found["causes"]]
    assert names[0] == "script-failed"
    assert "guess" not in found["causes"][0]
    assert "dtype-mismatch" in names
    assert len(names) <= 1 + 2
    assert any("Cast it." in fix["why"] and FLURB in fix["why"] for fix in found["fixes"])


def test_words_that_a_rule_knows_are_no_guess_about_the_users_own_code() -> None:
    frames = [
        '  File "/opt/site-packages/torch/utils/data/dataloader.py", line 7, in next',
        '  File "/data/me/collate.py", line 9, in __call__',
    ]
    words = "RuntimeError: stack expects each tensor to be equal size, but got [5] at entry 0"
    found = first_finding("\n".join([HEAD, *frames, words]))
    assert found["name"] == "user-code-failed"
    (known,) = [cause for cause in found["causes"] if cause["name"] == "rows-unequal-length"]
    assert known["why"] == "ERR465 knows these words"
    assert "guess" not in known


def test_beside_a_recognised_illness_stands_a_clear_guess_that_nothing_else_names() -> None:
    words = "RuntimeError: NCCL error in: the flurb is out of glorp, unhandled system error"
    found = first_finding(words)
    assert found["code"].startswith("ERR")
    (guess,) = [cause for cause in found["causes"] if "guess" in cause]
    assert guess == found["causes"][-1]
    assert guess["name"] == "dtype-mismatch"
    assert "a guess, right in about" in guess["why"]


@pytest.mark.parametrize(
    ("confidence", "votes", "is_said"),
    [
        (Confidence.INFERRED, 0.09, False),
        (Confidence.INFERRED, 0.11, True),
        (Confidence.HEURISTIC, 0.11, True),
        (Confidence.MEASURED, 0.6, False),
    ],
)
def test_an_error_that_says_so_itself_gets_no_guess(
    confidence: Confidence, votes: float, is_said: bool
) -> None:
    named = Finding(
        "ERR550", "disk-full-or-quota", Family.CHECKPOINT, Level.ERROR, confidence, "full"
    )
    known = Guess("disk-full-or-quota", 0.3, None), Guess("path-missing", votes, None)
    assert bool(list(second_opinion._beside([named], known))) == is_said


def test_a_cause_that_means_the_same_as_what_is_said_is_no_second_guess() -> None:
    known = next(one for one in SIGNATURES if one.name == "vllm-version-incompatible")
    text = next(one for one in known.texts if "*" not in one and "&&" not in one)
    said = first_finding(f"{text}\nGizmoError: the gizmo has no whirl")
    assert said["name"] == known.name
    assert not any(cause["name"] == known_cases.VERSIONS for cause in said["causes"])


def test_words_of_a_signatures_description_count() -> None:
    known = next(one for one in SIGNATURES if one.name == "right-padded-generation")
    with leaving_out("", known.texts):
        assert known.name in [guess.cause for guess in guesses([known.what])]


def test_the_last_telling_lines_are_read() -> None:
    lines = ["cannot a", "fine", "cannot b", "invalid c", "fails d", "it must e", "", "bye"]
    assert telling_lines(lines) == "cannot b\ninvalid c\nfails d\nit must e"
    assert telling_lines(["one", "two"]) == "one\ntwo"
    assert telling_lines(["no such file: /data/a/b/c.py, /c.py"]) == "no such file: b/c.py, c.py"
    assert telling_lines([]) == ""
    assert guesses([]) is not None


def test_a_few_lines_that_somebody_pasted_are_enough() -> None:
    found = first_finding("this flurb only supports glorp 9, and the flurb is out of glorp")
    assert (found["code"], found["level"]) == ("VIT002", "warn")
    assert "reads like an error" in found["message"]


@pytest.mark.parametrize(
    "line",
    [
        "NCCL WARN Duplicate flurb found",
        "the flurb is out of glorp, need to convert all flurbs before",
        "flurb backend not set, please initialize it",
        "exits with return code = -7",
    ],
)
def test_a_pasted_line_that_says_that_something_is_wrong_is_read(line: str) -> None:
    found = first_finding(line)
    assert found["code"] == "VIT002" or found["code"].startswith("ERR")


@pytest.mark.parametrize(
    "text",
    [
        "loading the model\nall weights were loaded",
        "2025-01-01 INFO please wait, the cache is not set\n 40%|####      | 4/10 [00:01<00:02]",
        "{'loss': 2.1, 'epoch': 0.1}\n{'loss': 2.0, 'epoch': 0.2}\n{'loss': 1.9, 'epoch': 0.3}",
        "2025-01-01 INFO cache not found, building it",
        "\n".join([f"row {i} is written" for i in range(40)] + ["the flurb is not supported"]),
    ],
)
def test_other_texts_are_not_taken_for_errors(text: str) -> None:
    view = read_text(text)
    assert not [one for one in diagnose(view, RULES).findings if one.code == "VIT002"]


def test_a_cause_that_was_read_is_not_guessed_again_under_another_name() -> None:
    log = (
        "GizmoError: gizmo has no whirl\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/lib/python3.11/site-packages/torch/utils/data/fetch.py", line 52, in fetch\n'
        "    return len(images)\n"
        "TypeError: object of type 'NoneType' has no len()"
    )
    names = [cause["name"] for cause in first_finding(log)["causes"]]
    assert names[0] == "known-bad-version"
    assert known_cases.VERSIONS not in names


def test_a_version_is_advised_only_where_the_log_names_its_package() -> None:
    gizmo = KnownCase(GIZMO, (known_cases.VERSIONS,), "", "Upgrade gizmo.")
    for fix in ("Upgrade gizmo.", "Pin gizmo<2.1.", "Take the repaired release."):
        case = replace(gizmo, fix=fix)
        assert known_cases._is_about(case, {"gizmo"})
        assert not known_cases._is_about(case, {"flurb"})
    assert known_cases._is_about(replace(gizmo, fix="End the path with a slash."), {"flurb"})
    near = "GizmoError: the gizmo has no whirl"
    (guess, *_) = guesses([near])
    assert guess.case is not None
    (guess, *_) = guesses([near.replace("gizmo ", "thing ").replace("GizmoError", "Gizmoerror")])
    assert guess.case is None
