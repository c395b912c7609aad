"""Every signature against logs composed for it.

A case of signatures/<family>.toml:

    [[case]]
    code = "ERR001"
    title = "what the log shows"
    log = '''...'''
    framework = "trl"       # optional: what the reader must take the log for
    config = { ... }        # optional: settings by the framework's own names
    not = true              # optional: the code must not be among the findings
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.health.markdown import named

from homeostat.health.diagnose import diagnose
from homeostat.health.finding import Confidence, Family, Finding, Level
from homeostat.health.frameworks import ALL
from homeostat.health.frameworks.planned import FOREIGN, PLANNED
from homeostat.health.readers import read_text
from homeostat.health.registry import BY_CODE, RULES, SIGNATURES
from homeostat.health.vocabulary import FAMILY_OF

FOLDER = Path(__file__).parent / "signatures"
CONFIG_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "config.md"
OUR_KEYS = set(re.findall(r"^\| `([\w.]+)`", CONFIG_PAGE.read_text(encoding="utf-8"), re.M))


@dataclass(frozen=True)
class TextCase:
    """A log, and the signature that stands in it, or that it only looks like."""

    code: str
    title: str
    log: str
    framework: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    absent: bool = False

    def findings(self) -> tuple[Finding, ...]:
        view = read_text(self.log, config=self.config or None)
        if self.framework:
            assert view.framework.name == self.framework
        return diagnose(view, RULES).findings


def read_cases(file: Path) -> list[TextCase]:
    rows = tomllib.loads(file.read_text(encoding="utf-8"))["case"]
    return [TextCase(absent=row.pop("not", False), **row) for row in rows]


# Of a file each: one test for all of them is over sooner than a test for each begins.
CASES_OF = {file.stem: read_cases(file) for file in sorted(FOLDER.glob("*.toml"))}
CASES = [case for cases in CASES_OF.values() for case in cases]
LEVELS = {one.code: one.level for one in SIGNATURES}


@pytest.mark.parametrize("family", CASES_OF)
def test_a_signature_is_recognised_in_its_logs(family: str) -> None:
    for case in CASES_OF[family]:
        with named(f"{case.code}: {case.title}"):
            _is_recognised(case)


def _is_recognised(case: TextCase) -> None:
    found = case.findings()
    if case.absent:
        assert case.code not in [finding.code for finding in found]
    elif LEVELS[case.code] is Level.INFO:
        assert case.code in [finding.code for finding in found]
    else:
        alarms = [finding.code for finding in found if finding.level is not Level.INFO]
        assert alarms, "nothing was recognised"
        assert alarms[0] == case.code, alarms


def test_a_signature_has_a_case_and_says_what_to_do() -> None:
    with_cases = {case.code for case in CASES if not case.absent}
    for signature in SIGNATURES:
        assert signature.code in with_cases, f"{signature.code}: compose a log for it"
        assert signature.fixes, f"{signature.code}: what should its owner do?"
        causes = [cause.name for cause in signature.causes] or [signature.name]
        assert [name for name in causes if name not in FAMILY_OF] == [], signature.code


def test_what_is_inferred_of_an_installation_or_of_numbers_names_what_else_it_may_be() -> None:
    families = (Family.INSTALL, Family.NUMERICS)
    inferred = [
        one
        for one in SIGNATURES
        if one.family in families
        and one.confidence is not Confidence.MEASURED
        # What one release of one library says for a bug of its own has no other cause.
        and one.name != "known-bad-version"
    ]
    assert [one.code for one in inferred if len({cause.name for cause in one.causes}) < 2] == []


def test_a_fix_names_settings_and_frameworks_that_exist() -> None:
    known = OUR_KEYS | set(PLANNED) | set(FOREIGN)
    fixes = [(signature.code, fix) for signature in SIGNATURES for fix in signature.fixes]
    assert [(code, fix) for code, fix in fixes if fix.setting and fix.setting not in known] == []
    assert [(code, fix) for code, fix in fixes if not set(fix.theirs) <= set(ALL)] == []


def test_a_case_belongs_to_a_signature() -> None:
    assert {case.code for case in CASES} <= set(LEVELS)
    assert len({(case.code, case.title) for case in CASES}) == len(CASES)


def test_a_text_says_enough_to_be_told_from_others() -> None:
    for signature in SIGNATURES:
        for pattern in (*signature.texts, *signature.context, *signature.unless):
            longest = max(re.split(r"\*| && ", pattern), key=len)
            assert len(longest) >= 4, f"{signature.code}: {pattern!r} is found everywhere"


def test_the_page_of_a_signature_says_what_to_change_and_not_only_why() -> None:
    page = BY_CODE["ERR024"].text
    assert "- `engine.memory_share` (higher, in steps of 0.05): Weights, activations" in page
    assert "`pad_token`" in BY_CODE["ERR451"].text
