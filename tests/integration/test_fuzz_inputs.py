"""Mutated recipes, rows, models and run folders: never a traceback, always a place.

The benchmark's own code (bench/fuzz_inputs.py) on fewer cases; a case is a function of the seed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
SEED = 20


# Some cases are compared with a separate process, as a user starts it; its imports take seconds.
@pytest.mark.parametrize(
    ("num_cases", "num_compared"),
    [(5, 0), pytest.param(80, 2, marks=pytest.mark.slow)],
    ids=["few", "more"],
)
def test_mutated_inputs_are_accepted_or_refused_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cases: int, num_compared: int
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import fuzz_inputs

    for name, value in fuzz_inputs.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    fuzz_inputs.write_base(tmp_path / "base")
    verdicts = fuzz_inputs.run_all(tmp_path, range(num_cases), seed=SEED, num_workers=1)
    found = fuzz_inputs.summary(verdicts)
    assert not found["violations"], json.dumps(found["violations"], indent=1)
    # The mutations must bite, and the base must be sound.
    assert found["outcomes"]["refused"] > num_cases / 2
    assert found["outcomes"]["accepted"] > num_cases / 20
    assert fuzz_inputs.compare_processes(tmp_path, verdicts[:num_compared], seed=SEED) == []
