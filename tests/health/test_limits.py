"""A finding's value lies on the side of its limit that the rule fired for, whatever the noise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.health.markdown import Case, by_letters, named
from tests.health.test_rules import CASES

from homeostat.health.diagnose import judge
from homeostat.health.finding import Finding, Level, NotEvaluated
from homeostat.health.registry import BY_CODE
from homeostat.health.view import RunView, Series

# Limits on both sides, of which the finding names the one that was passed.
TWO_SIDED = {"POL009", "OFF005", "LRN021", "CFG008"}
FIRING = by_letters(
    case for case in CASES if case.title.startswith("Fires") and case.code not in TWO_SIDED
)


def findings(case: Case, view: RunView) -> list[Finding]:
    """Those of level warn or above that name a value and a limit."""
    with np.errstate(all="ignore"):
        found = judge(BY_CODE[case.code], view, options=case.about.get("options", {}))
    known = [] if isinstance(found, NotEvaluated) else found
    return [f for f in known if f.level is not Level.INFO and None not in (f.value, f.limit)]


def side(finding: Finding) -> int:
    assert finding.value is not None
    assert finding.limit is not None
    return int(np.sign(finding.value - finding.limit))


def shaken(view: RunView, seed: int) -> RunView:
    """The same run with noise, with single low records, or with other newest records."""
    rng, metrics = np.random.default_rng(seed), {}
    for name, series in view.metrics.items():
        values, num = series.values, len(series)
        if seed % 3 == 0:
            values = values * (1.0 + rng.normal(0.0, 0.3, num))
        elif seed % 3 == 1:
            values = np.where(rng.random(num) < 0.3, values * rng.uniform(0.2, 1.0), values)
        else:
            late = np.arange(num) >= num - rng.integers(1, 3)
            values = np.where(late, values * rng.uniform(0.3, 1.5), values)
        if series.values.min() >= 0.0 and series.values.max() <= 1.0:
            values = np.clip(values, 0.0, 1.0)
        metrics[name] = Series(series.steps, values)
    return dataclasses.replace(view, metrics=metrics)


@pytest.mark.parametrize("letters", FIRING)
def test_value_and_limit_agree_with_the_comparison_that_fired(letters: str) -> None:
    for case in FIRING[letters]:
        with named(f"{case.code} {case.title}"):
            _agrees(case)


def _agrees(case: Case) -> None:
    view = case.view()
    for first in findings(case, view)[:1]:
        for seed in range(18):
            for found in findings(case, shaken(view, seed)):
                # A limit that may be reached exactly has either sign of 0.
                assert side(found) in (side(first), 0) or side(first) == 0, (found.value, found)
