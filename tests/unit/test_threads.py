"""The collection of real threads: its files are valid, and `dev add-case` keeps them so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from homeostat.cli import scaffolding, threads
from homeostat.cli.threads import FOLDER, Half
from homeostat.cli.verbs import app
from homeostat.errors import HomeostatError
from homeostat.health.vocabulary import FAMILY_OF

ROOT = Path(__file__).resolve().parents[2]
CASE: dict[str, Any] = {
    "framework": "trl",
    "version": "0.15.0",
    "url": "https://github.com/owner/name/issues/7",
    "when": "2025-02-16",
    "names": ["nan-loss"],
    "tellable": True,
    "log": "RuntimeError: loss is nan at step 12",
    "cause": "The learning rate is too high.",
    "fix": "Lower it.",
    "settings": ["learning_rate"],
}


def test_collection_is_valid() -> None:
    found = {half: threads.load(ROOT, half) for half in Half}
    cases = [case for half in Half for case in found[half]]
    misplaced = [case.url for half in Half for case in found[half] if threads.half_of(case) != half]
    assert not misplaced
    assert len({case.url for case in cases}) == len(cases)
    assert len({case.framework for case in cases}) >= 25
    files = list((ROOT / FOLDER).iterdir())
    assert sum(file.stat().st_size for file in files) < 3_000_000


def test_listed_runs_are_labelled() -> None:
    lines = (ROOT / FOLDER / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["label"] for row in rows} == {"healthy", "ill", "unclear"}
    assert all(bool(row["names"]) == (row["label"] == "ill") and row["why"] for row in rows)
    assert all(name in FAMILY_OF for row in rows for name in row["names"])
    assert len({row["sha256"] for row in rows if not row["seen"]}) == sum(
        not row["seen"] for row in rows
    )


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scaffolding, "find_checkout", lambda: tmp_path)
    return tmp_path


def _added(tmp_path: Path, *rows: dict[str, Any]) -> Any:
    file = tmp_path / "cases.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return CliRunner().invoke(app, ["dev", "add-case", str(file)])


def test_add_case_appends_to_the_half_of_repository_and_month(checkout: Path) -> None:
    rows = [
        {**CASE, "url": f"https://github.com/owner/n{i}/issues/7", "log": f"Error: {chr(97 + i)}"}
        for i in range(12)
    ]
    done = _added(checkout, *rows)
    assert done.exit_code == 0, done.output
    stored = {half: threads.load(checkout, half) for half in Half}
    assert all(stored.values())
    assert sum(map(len, stored.values())) == 12
    moved = threads.parse({**rows[0], "when": "2025-02-28", "url": rows[0]["url"] + "#note"})
    assert threads.half_of(moved) == threads.half_of(threads.parse(rows[0]))


def test_answers_of_expert_and_second_labeller_are_kept_where_asked(checkout: Path) -> None:
    asked = {**CASE, "told": "family", "review": "agreed"}
    other = {**CASE, "url": "https://github.com/owner/name/issues/8", "log": "Error: b"}
    assert _added(checkout, asked, other).exit_code == 0
    found = [case for half in Half for case in threads.load(checkout, half)]
    assert [(case.told, case.review) for case in found] == [("family", "agreed"), ("", "")]
    lines = [file.read_text() for file in (checkout / FOLDER).iterdir()]
    assert sum(text.count('"told"') for text in lines) == 1


@pytest.mark.parametrize(
    "second",
    [
        {"log": "another text"},
        {"url": "https://github.com/owner/name/pull/7", "log": "another text"},
        {
            "url": "https://github.com/other/name/issues/1",
            "log": "RuntimeError: loss is nan at step 9",
        },
    ],
)
def test_add_case_refuses_duplicates(checkout: Path, second: dict[str, Any]) -> None:
    assert _added(checkout, CASE).exit_code == 0
    refused = _added(
        checkout, {**CASE, "url": "https://github.com/a/b/issues/1", "log": "x"}, {**CASE, **second}
    )
    assert isinstance(refused.exception, HomeostatError)
    assert "in the collection already" in str(refused.exception)
    assert sum(len(threads.load(checkout, half)) for half in Half) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names": ["no-such-illness"]}, "vocabulary"),
        ({"names": []}, "names is empty"),
        ({"when": "last week"}, "2025-03-31"),
        ({"url": "huggingface/trl#7"}, "full https address"),
        ({"log": "x\n" * 80}, "at most 60"),
        ({"log": "token hf_AbCdEfGh12345678901234567890123456"}, "access token"),
        ({"cause": "word " * 100}, "one sentence"),
        ({"tellable": "yes"}, "true or false"),
        ({"told": "perhaps"}, "right, family, nothing"),
        ({"review": True}, "review must be a text"),
        ({"colour": "red"}, "unknown: colour"),
    ],
)
def test_add_case_says_what_is_wrong(checkout: Path, change: dict[str, Any], said: str) -> None:
    refused = _added(checkout, CASE, {**CASE, **change})
    assert isinstance(refused.exception, HomeostatError)
    assert "line 2" in str(refused.exception)
    assert said in str(refused.exception)
    assert not (checkout / FOLDER).exists()
