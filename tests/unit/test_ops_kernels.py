"""The kernels' tests, in a process that interprets Triton: here no GPU is needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.forks import Forked

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600


# The small shapes, where every kernel runs forward and backward; the rest runs at night.
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize(
    "which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)], ids=["small", "rest"]
)
# Two halves, so that two processes can share them.
@pytest.mark.parametrize("half", [0, 1])
def test_kernels_pass_their_tests_in_the_interpreter(half: int, which: str) -> None:
    pytest.importorskip("triton")
    arguments = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        which,
        *map(str, sorted((ROOT / "tests/kernels").glob("test_*.py"))[half::2]),
    ]
    process = Forked(
        "import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))",
        arguments,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output[-8000:]
    assert " skipped" not in output, output[-2000:]
