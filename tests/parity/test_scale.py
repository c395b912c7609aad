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
from scale_parity import OFFLOAD, Case  # noqa: E402

pytestmark = pytest.mark.ranks
# What tests/parity/test_fsdp.py and test_sequence.py do not check: offloading, and experts divided
# over ranks. The others are for the night.
KEPT = [
    Case(2, "dense", OFFLOAD),
    Case(2, "experts", {"expert_parallel_size": 2}),
    Case(4, "experts", {"expert_parallel_size": 4, "context_parallel_size": 2}),
]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[scale_parity.Table]:
    with ranks.forked():
        yield scale_parity.Table(tmp_path_factory.mktemp("scale"))


def cases() -> list[Any]:
    return [
        pytest.param(
            case,
            id=f"{case.ranks} ranks: {case.mesh}",
            marks=[] if case in KEPT else [pytest.mark.slow],
        )
        for case in scale_parity.CASES
    ]


@pytest.mark.parametrize("case", cases())
def test_a_mesh_trains_as_the_local_trainer(
    table: scale_parity.Table, case: scale_parity.Case
) -> None:
    row = table.measure(case)
    assert row.is_equal, row


def test_the_kept_meshes_are_of_the_table() -> None:
    assert all(case in scale_parity.CASES for case in KEPT)
