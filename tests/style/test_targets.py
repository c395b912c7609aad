"""The test targets of the Makefile name files that exist, and miss none that they should run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
# Files that start no vLLM themselves: they hold the engines, which the contract suites run.
HOLDS_ENGINES = "tests/contract/engines.py"


def commands(target: str) -> str:
    """Return the lines that `make target` runs."""
    found = re.search(rf"^{target}:[^\n]*\n((?:\t[^\n]*\n)+)", MAKEFILE, re.MULTILINE)
    assert found is not None, target
    return found.group(1)


def places(target: str) -> list[str]:
    """Return the files and folders that a target hands to pytest; empty if it runs them all."""
    return re.findall(r"(?<= )tests/\S+", commands(target))


def marked(name: str) -> set[str]:
    """Return the test files that use a marker."""
    files = (ROOT / "tests").rglob("*.py")
    return {
        file.relative_to(ROOT).as_posix()
        for file in files
        if f"mark.{name}" in file.read_text(encoding="utf-8") and file != Path(__file__)
    }


def takes_engines() -> set[str]:
    """Return the suites that run over every engine."""
    return {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests/contract").glob("test_*.py")
        if re.search(r"\bbuild: Backend\b", file.read_text(encoding="utf-8"))
    }


TARGETS = (
    *("unit", "test-nightly", "test-ranks"),
    *("vllm-dense", "vllm-experts", "test-vllm-nightly", "test-sglang"),
)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_names_each_place_once_and_it_exists(target: str) -> None:
    named = places(target)
    assert len(set(named)) == len(named)
    assert [place for place in named if not (ROOT / place).exists()] == []


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_uses_markers_that_are_declared(target: str) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = {
        line.partition(":")[0] for line in settings["tool"]["pytest"]["ini_options"]["markers"]
    }
    (chosen,) = re.findall(r"-m '([^']+)'", commands(target))
    words = set(re.findall(r"\w+", chosen)) - {"and", "or", "not"}
    # hypothesis marks its tests itself.
    assert words <= declared | {"hypothesis"}


def test_every_file_with_ranks_is_run_by_its_target() -> None:
    assert set(places("test-ranks")) == marked("ranks")


def test_every_file_with_vllm_is_run_by_its_targets() -> None:
    folder = "tests/vllm"
    outside = {file for file in marked("vllm") if not file.startswith(f"{folder}/")}
    assert outside == {HOLDS_ENGINES}
    # Its tests need a separate process.
    alone = "tests/vllm/test_vllm_moe.py"
    assert set(places("vllm-dense")) == {folder, alone, *takes_engines()}
    assert f"--ignore {alone}" in commands("vllm-dense")
    assert places("vllm-experts") == [alone]
    assert set(places("test-vllm-nightly")) == {folder, *takes_engines()}
    assert "vllm-dense vllm-experts" in commands("test-vllm")


def test_sglang_is_held_to_the_suites_of_every_engine() -> None:
    assert set(places("test-sglang")) == takes_engines()
    assert marked("sglang") == {HOLDS_ENGINES}


def test_the_nightly_table_names_every_file_with_slow_tests() -> None:
    """Folders stand for their files."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.partition("| nightly tests |")[2].partition("\n\n")[0]
    missing = [
        file
        for file in sorted(marked("slow"))
        if Path(file).stem not in table and str(Path(file).parent) not in table
    ]
    # Those of vLLM have their own nightly target.
    assert [file for file in missing if not file.startswith("tests/vllm/")] == []
