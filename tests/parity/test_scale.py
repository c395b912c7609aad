"""Every mesh of bench/scale_parity.py trains as the local trainer does, and resumes on another one.

The table itself is the benchmark's; here its ranks are forked, because importing torch takes longer
than all updates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import ranks

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.append(str(BENCH))
import scale_parity  # noqa: E402

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[scale_parity.Table]:
    with ranks.forked():
        yield scale_parity.Table(tmp_path_factory.mktemp("scale"))


def cases() -> list[Any]:
    """A mesh without further settings is what tests/parity/test_fsdp.py checks in every respect,
    and ranks that share micro-batches are what tests/parity/test_sequence.py does; except both with
    experts divided over ranks."""
    return [
        pytest.param(
            case,
            id=f"{case.ranks} ranks: {case.mesh}",
            marks=[pytest.mark.slow] if is_checked_elsewhere(case) else [],
        )
        for case in scale_parity.CASES
    ]


def is_checked_elsewhere(case: scale_parity.Case) -> bool:
    shares_rows = {"context_parallel_size", "sequence_parallel_size"} & case.backend.keys()
    return not (case.backend or case.trainer) or (bool(shares_rows) and case.model == "dense")


@pytest.mark.parametrize("case", cases())
def test_a_mesh_trains_as_the_local_trainer(
    table: scale_parity.Table, case: scale_parity.Case
) -> None:
    row = table.measure(case)
    assert row.is_equal, row
