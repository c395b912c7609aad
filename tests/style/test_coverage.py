"""The coverage page is true: rules and keys that it names exist, nothing is left empty.

The page is made from docs/coverage/ by docs/generate.py.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from homeostat.config.loading.schema import walk_keys
from homeostat.config.run import RunConfig
from homeostat.health.frameworks.known import known
from homeostat.health.frameworks.planned import PLANNED
from homeostat.health.registry import BY_CODE

ROOT = Path(__file__).resolve().parents[2]
MADE: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate.py"), run_name="generate")
SYMPTOMS = MADE["symptom_rows"]()
SETTINGS = MADE["setting_rows"]()
DISAGREEMENTS = MADE["disagreement_rows"]()
NO_CODE = MADE["NO_CODE"]
PAGE = ROOT / "docs" / "reference" / "coverage.md"
# Rows per guide that reading it line by line gave: one that goes away must be missed.
LEAST = {
    "miles: troubleshooting": (29, 39),
    "axolotl: training stability": (77, 56),
    "LightRFT: troubleshooting": (38, 50),
    "ChatLearn: FAQ": (12, 14),
    "slime: Q&A": (20, 26),
}
CODE = re.compile(r"\b[A-Z]{3}\d{3}\b")


def our_keys() -> set[str]:
    """Keys of a recipe, and the sections that they stand in."""
    leaves = {path for path, *_ in walk_keys(RunConfig)}
    sections = {leaf[: m.start()] for leaf in leaves for m in re.finditer(r"(\[\])?\.", leaf)}
    return leaves | sections


def test_the_page_is_fresh() -> None:
    fresh = f"{MADE['NOTE']}\n{MADE['coverage_page']().rstrip()}\n"
    assert PAGE.read_text(encoding="utf-8") == fresh, "stale: run `make docs`"


@pytest.mark.parametrize("guide", LEAST)
def test_no_row_of_a_guide_is_lost(guide: str) -> None:
    num_symptoms, num_settings = LEAST[guide]
    assert len(SYMPTOMS[guide]) >= num_symptoms
    assert len(SETTINGS[guide]) >= num_settings
    assert any(row[0] == guide for row in DISAGREEMENTS)


def test_there_are_no_other_guides() -> None:
    assert set(SYMPTOMS) == set(SETTINGS) == set(LEAST)
    assert {row[0] for row in DISAGREEMENTS} == set(LEAST)


def test_no_cell_is_empty_and_no_row_is_there_twice() -> None:
    tables = [*SYMPTOMS.values(), *SETTINGS.values(), DISAGREEMENTS]
    assert [row for rows in tables for row in rows if not all(cell.strip() for cell in row)] == []
    assert [rows for rows in tables if len({row[:2] for row in rows}) != len(rows)] == []


def test_every_symptom_has_rules_that_exist() -> None:
    cells = [(row[1], row[2]) for rows in SYMPTOMS.values() for row in rows]
    coded = [(said, codes.split()) for said, codes in cells if codes not in NO_CODE]
    assert [said for said, codes in coded if not codes or not set(codes) <= BY_CODE.keys()] == []
    assert len(cells) - len(coded) <= len(LEAST), "write the rule in place of a word"


def test_every_disagreement_has_a_rule_that_advises_rightly() -> None:
    unknown = [row for row in DISAGREEMENTS if not set(row[3].split()) <= BY_CODE.keys()]
    assert unknown == []


def test_codes_in_the_text_exist() -> None:
    assert set(CODE.findall(PAGE.read_text(encoding="utf-8"))) <= BY_CODE.keys()


@pytest.mark.parametrize("guide", SETTINGS)
def test_every_setting_has_a_key_a_planned_key_or_a_reason(guide: str) -> None:
    keys = our_keys()
    for name, place, _ in SETTINGS[guide]:
        if place == "none":
            continue
        known = PLANNED.keys() if place.startswith("pending: ") else keys
        unknown = [key for key in place.removeprefix("pending: ").split() if key not in known]
        assert not unknown, f"{name}: {unknown}"


def test_what_a_guide_names_and_the_sources_lack_is_said_and_never_advised() -> None:
    frameworks = {"miles: troubleshooting": "miles", "LightRFT: troubleshooting": "lightrft"}
    absent = MADE["settings_not_in_sources"]()
    assert absent.keys() == frameworks.keys()
    for guide, names in absent.items():
        assert set(names) <= {row[0] for row in SETTINGS[guide]}
        assert [name for name in names if known(frameworks[guide]).spelling(name)] == []
        page = MADE["_settings"](guide, SETTINGS[guide])
        assert page.count("s sources (20") == len(names)


def test_keys_in_the_text_exist() -> None:
    """What is written in backticks, and begins as our keys do, is one."""
    keys = our_keys() | PLANNED.keys()
    heads = "|".join(sorted({key.split(".")[0] for key in keys if "." in key}))
    quoted = re.findall(rf"`((?:{heads})\.[\w.\[\]]+)(?:: [^`]+)?`", PAGE.read_text())
    assert len(quoted) > 100
    assert sorted(set(quoted) - keys) == []
