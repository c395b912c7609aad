"""Every rule against its Markdown cases, and the catalogue against its own laws."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.health.markdown import KINDS, Case, by_code, named, read_cases

import homeostat.health
from homeostat.health.diagnose import judge
from homeostat.health.finding import Finding, Level, NotEvaluated
from homeostat.health.names import FOREIGN
from homeostat.health.registry import BY_CODE, RULES, SIGNATURES, rule_files
from homeostat.health.rule import HEADINGS, Rule
from homeostat.health.vocabulary import FAMILY_OF
from homeostat.observe.names import describe

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("*.md"))
CASES = [case for file in FILES for case in read_cases(file)]
BY_WORDS = {one.code for one in SIGNATURES}
CASES_OF = by_code(CASES)
WITH_FILES = [rule for rule in RULES if rule.code not in BY_WORDS]


@pytest.mark.parametrize("code", CASES_OF)
def test_a_rule_judges_its_cases(code: str) -> None:
    for case in CASES_OF[code]:
        with named(case.title):
            _judges(case)


# What a block `expect` may say.
EXPECTED = {
    "clear",
    "not_evaluated",
    "first_step",
    "level",
    "causes",
    "fixes",
    "contains",
    "confidence",
    "subject",
}


def _judges(case: Case) -> None:
    found = judge(BY_CODE[case.code], case.view(), options=case.about.get("options", {}))
    expected = case.expected
    assert expected.keys() <= EXPECTED, case.title
    if "not_evaluated" in expected:
        assert isinstance(found, NotEvaluated)
        assert expected["not_evaluated"] in found.why
    elif expected.get("clear"):
        assert found == []
    else:
        assert isinstance(found, list), found
        assert found, "the rule is clear"
        _require(found[0], expected)
    for finding in [] if isinstance(found, NotEvaluated) else found:
        assert [c.name for c in finding.causes if c.name not in FAMILY_OF] == []
        assert finding.causes, "a finding has at least one cause"


def _require(finding: Finding, expected: dict) -> None:
    for name in ("first_step", "level", "confidence", "subject"):
        if name in expected:
            assert getattr(finding, name) == expected[name], finding
    causes = [cause.name for cause in finding.causes]
    wanted = expected.get("causes", [])
    assert causes[: len(wanted)] == wanted, finding
    assert expected.get("contains", "") in finding.message
    settings = [fix.setting for fix in finding.fixes]
    wanted = expected.get("fixes", [])
    assert settings[: len(wanted)] == wanted, finding


def test_a_rule_has_cases_that_fire_nearly_fire_and_are_healthy() -> None:
    for rule in WITH_FILES:
        titles = [case.title for case in CASES_OF.get(rule.code, [])]
        for kind in KINDS[:3]:
            assert any(title.startswith(kind) for title in titles), (rule.code, f"no {kind!r}")
        assert all(title.startswith(KINDS) for title in titles), rule.code


def test_a_rule_says_all_that_its_page_needs() -> None:
    for rule in RULES:
        with named(rule.code):
            _says_all(rule)


def _says_all(rule: Rule) -> None:
    assert re.findall(r"^## (.+)$", rule.text, re.M) == list(HEADINGS)
    parts = re.split(r"^## .+$", rule.text, flags=re.M)
    assert all(part.strip() for part in parts), "a heading without text"
    assert all(meaning for _, meaning in rule.option_fields().values())
    assert rule.name in FAMILY_OF, "name it in health/vocabulary.py"
    unknown = [code for code in rule.explains if code not in BY_CODE]
    assert not unknown
    if rule.name.startswith("benign-"):
        assert rule.level is Level.INFO


def test_nothing_that_was_laid_out_is_left_unwritten() -> None:
    """`homeostat scaffold` writes PLACEHOLDER where its author has something to say."""
    health = Path(homeostat.health.__file__).parent
    written = [*rule_files(), *health.glob("signatures/*.toml"), health / "vocabulary.py"]
    written += [*FILES, *FOLDER.glob("signatures/*.toml")]
    assert len(written) > 300
    assert [f.name for f in written if "PLACEHOLDER" in f.read_text(encoding="utf-8")] == []


def test_a_rule_reads_names_that_exist() -> None:
    for rule in RULES:
        for need in rule.needs:
            if ":" in need or need in ("log", "events", "samples"):
                continue
            for name in need.split("|"):
                assert describe(name) is not None or name in FOREIGN, (rule.code, name)
