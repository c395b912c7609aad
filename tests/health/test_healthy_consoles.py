"""Whole consoles of short runs that ended well, with the warnings that they usually print.

Each was run with the library as it is; paths are replaced and blank lines left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.finding import Level
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES

CONSOLES = sorted((Path(__file__).parent / "benign" / "consoles").glob("*.log"))


@pytest.mark.parametrize("path", CONSOLES, ids=lambda path: path.stem)
def test_a_run_that_ended_well_is_not_called_ill(path: Path) -> None:
    view = read_text(path.read_text(encoding="utf-8"), config=None)
    found = [one for one in diagnose(view, RULES).findings if one.level is not Level.INFO]
    assert not found, [(one.code, one.message) for one in found]
