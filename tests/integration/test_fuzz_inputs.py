"""Mutated recipes, rows, models and run folders: never a traceback, always a place.

The benchmark's own code (bench/fuzz_inputs.py) on fewer cases; a case is a function of the seed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
NUM_CASES = 40
SEED = 20


def test_mutated_inputs_are_accepted_or_refused_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import fuzz_inputs

    for name, value in fuzz_inputs.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    fuzz_inputs.write_base(tmp_path / "base")
    verdicts = fuzz_inputs.run_all(tmp_path, range(NUM_CASES), seed=SEED, num_workers=1)
    found = fuzz_inputs.summary(verdicts)
    assert not found["violations"], json.dumps(found["violations"], indent=1)
    # The mutations must bite, and the base must be sound.
    assert found["outcomes"]["refused"] > NUM_CASES / 2
    assert found["outcomes"]["accepted"] > NUM_CASES / 20
    assert fuzz_inputs.compare_processes(tmp_path, verdicts[:2], seed=SEED) == []
