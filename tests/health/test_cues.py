"""The cues of a pattern: every match has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from homeostat.cli.threads import Half, load
from homeostat.health.failures.cues import cues_of
from homeostat.health.failures.details import _all_forms

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("pattern", "cues"),
    [
        ("no such file", ("no such file",)),
        ("(?i)No Such", ("no such",)),
        (r"has no len\(\)", ("has no len()",)),
        ("colou?r of paint", ("r of paint",)),
        ("ab+cdef", ("cdef",)),
        ("x{0,3}hello", ("hello",)),
        ("[Uu]nknown (key|field)", ("nknown ",)),
        ("a(?:bcd|efg)h", ("bcd", "efg")),
        ("(?:bcd|efg)+", ("bcd", "efg")),
        ("(?P<name>word)s?", ("word",)),
        ("(?!never)always", ("always",)),
        # Nothing that every match contains, or too little of it.
        ("(foo|bar)?", ()),
        ("abcdef|", ()),
        ("(one|two|)", ()),
        (r"\w{1,9} \d", ()),
        ("[abc]{3}", ()),
    ],
)
def test_cues(pattern: str, cues: tuple[str, ...]) -> None:
    assert cues_of(pattern) == cues


def test_no_match_of_a_form_is_without_its_cues() -> None:
    logs = [case.log for case in load(ROOT, Half.OPEN)[::6]]
    num_matches = 0
    for form, cues in _all_forms():
        pattern = re.compile(form.pattern)
        found = [match[0].lower() for log in logs if (match := pattern.search(log)) is not None]
        num_matches += len(found)
        if cues:
            assert all(any(cue in text for cue in cues) for text in found), form.pattern
    assert num_matches > 60


def test_few_forms_have_to_be_compiled() -> None:
    forms = _all_forms()
    assert sum(not cues for _, cues in forms) <= len(forms) // 50
