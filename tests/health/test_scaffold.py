"""`homeostat scaffold`: what it lays out works at once, and is told to be unwritten."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.health.markdown import read_cases
from tests.health.test_signatures import read_cases as read_logs

import homeostat
from homeostat.cli import scaffolding
from homeostat.cli.scaffold import Kind, scaffold
from homeostat.errors import HomeostatError
from homeostat.health import registry
from homeostat.health.diagnose import judge
from homeostat.health.finding import Family
from homeostat.health.readers import read_text
from homeostat.health.rule import Rule
from homeostat.health.signatures.load import load
from homeostat.health.signatures.signature import rule_of

ROOT = Path(__file__).resolve().parents[2]
# A name that the vocabulary has already: signatures of several wordings share one.
KNOWN_NAME = "pinned-memory-exhausted"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The parts of a checkout that are written to."""
    parts = ("signatures", "rules/numerics", "vocabulary.py")
    for part in (*(scaffolding.HEALTH / one for one in parts), scaffolding.CASES / "signatures"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / part, tmp_path / part)
    return tmp_path


def load_rule(file: Path) -> Rule:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module.RULE


@pytest.mark.parametrize(
    "text", ["cudaHostAlloc failed", 'pinned "pool" * of * bytes', "it's full && 'pinned'"]
)
def test_a_signature_that_was_laid_out_sees_its_words(checkout: Path, text: str) -> None:
    laid = scaffolding.new_signature(checkout, name=KNOWN_NAME, family=Family.MEMORY, text=text)
    scaffolding.write(laid)
    signatures = {one.code: one for one in load(checkout / scaffolding.HEALTH / "signatures")}
    assert signatures.keys() - registry.BY_CODE.keys() == {laid.code}
    rule = rule_of(signatures[laid.code])
    cases = read_logs(checkout / scaffolding.CASES / "signatures" / "memory.toml")
    own = [case for case in cases if case.code == laid.code]
    found = [judge(rule, read_text(case.log)) for case in own]
    assert [len(findings) for findings in found if isinstance(findings, list)] == [1, 0]
    assert [case.absent for case in own] == [False, True]


def test_a_rule_that_was_laid_out_judges_its_cases(checkout: Path) -> None:
    name = "norm-above-all"
    laid = scaffolding.new_rule(checkout, name=name, family=Family.NUMERICS, metric="grad_norm")
    scaffolding.write(laid)
    file, cases, vocabulary = laid.files
    rule = load_rule(file)
    assert (rule.code, rule.name, rule.family) == (laid.code, name, Family.NUMERICS)
    for case in read_cases(cases):
        found = judge(rule, case.view())
        assert isinstance(found, list)
        assert [one.first_step for one in found] == ([] if case.expected.get("clear") else [3])
    assert name in runpy.run_path(str(vocabulary))["FAMILY_OF"]


def test_a_code_is_the_next_that_was_never_used(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def code() -> str:
        found = scaffolding.new_rule(
            checkout, name="norm-above-all", family=Family.NUMERICS, metric="grad_norm"
        )
        return found.code

    first = code()
    number = int(first[3:])
    assert first not in registry.BY_CODE
    assert f"NUM{number - 1:03}" in registry.BY_CODE
    monkeypatch.setitem(registry.RETIRED, first, "measured nothing")
    assert code() == f"NUM{number + 1:03}"


def test_codes_of_signatures_are_free_in_all_files(checkout: Path) -> None:
    codes = {
        scaffolding.new_signature(checkout, name=KNOWN_NAME, family=family, text="some words").code
        for family in (Family.MEMORY, Family.CONFIG, Family.DATA, Family.POLICY)
    }
    assert len(codes) > 1
    assert codes.isdisjoint(registry.BY_CODE)


def test_nothing_is_written_where_something_is_missing_or_too_much() -> None:
    def refused(kind: Kind, name: str = KNOWN_NAME, **given: str) -> str:
        with pytest.raises(HomeostatError) as error:
            scaffold(kind, name, family=Family.MEMORY, **given)
        return str(error.value)

    assert "needs --text" in refused(Kind.SIGNATURE)
    assert "needs --metric" in refused(Kind.RULE)
    assert "leave out --metric" in refused(Kind.SIGNATURE, text="some words", metric="reward")
    assert "found everywhere" in refused(Kind.SIGNATURE, text="a*b")
    assert "reads a metric" in refused(Kind.RULE, metric="rewrad")
    assert "small letters" in refused(Kind.RULE, name="Bad_Name", metric="reward")


def test_it_works_in_a_source_checkout_and_says_so_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scaffolding.find_checkout() == ROOT
    monkeypatch.setattr(homeostat, "__file__", str(tmp_path / "site" / "homeostat" / "__init__.py"))
    with pytest.raises(HomeostatError, match="not part of a source checkout"):
        scaffolding.find_checkout()


@pytest.mark.slow
def test_the_command_lays_out_what_passes_its_tests_in_a_whole_checkout(tmp_path: Path) -> None:
    for part in ("src", "tests", "docs", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    paths = f"{tmp_path / 'src'}{os.pathsep}{tmp_path}"

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    verb = ("-c", "from homeostat.cli.main import main; main()", "scaffold")
    run(*verb, "rule", "norm-above-all", "--family", "numerics", "--metric", "grad_norm")
    run(*verb, "signature", KNOWN_NAME, "--family", "memory", "--text", "cudaHostAlloc failed")
    for page, name in (("numerics", "norm-above-all"), ("memory", KNOWN_NAME)):
        text = (tmp_path / "docs" / "reference" / "rules" / f"{page}.md").read_text()
        assert f" {name}\n" in text
    codes = {*registry.BY_CODE}
    files = ["tests/health/test_rules.py", "tests/health/test_signatures.py"]
    said = run(*verb[:2], "rules", "--format", "json")

    new = {rule["code"] for rule in json.loads(said)} - codes
    assert len(new) == 2
    run("-m", "pytest", "-q", "-p", "no:xdist", *files, "-k", " or ".join(sorted(new)))
    left = run("-m", "pytest", "-q", "-p", "no:xdist", files[0], "-k", "unwritten", code=1)
    assert "PLACEHOLDER" in left
