"""A rank on a GPU (NCCL): offloaded weights and Adam, and divided experts.

NCCL refuses two ranks on one GPU, so the world has one. The CPU runs the same over several ranks in
tests/parity/test_scale.py, and over one in tests/unit/test_parallel_experts.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest
import torch
from tests.support.parallel_experts import alone, both

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_rank_that_offloads_trains_the_same_model_in_less_memory(tmp_path: Path) -> None:
    """The benchmark compares the losses, and exits with 1 if they differ by more than rounding."""
    code = (
        "import sys; sys.path.insert(0, 'bench'); import common, rank_offload; from pathlib import "
        f"Path; common.RESULTS_DIR = Path({str(tmp_path)!r}); rank_offload.main()"
    )
    command = [sys.executable, "-c", code, "--device", "cuda", "--layers", "12"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=PIPE, stderr=STDOUT, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads((tmp_path / "rank_offload_cuda.json").read_text())
    peaks = [found[name]["peak_bytes"] for name in ("on the device", "offload_optimizer")]
    assert peaks[1] < peaks[0]
    assert found["offload_params"]["peak_bytes"] < peaks[1]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_divided_experts_compute_what_one_process_does(
    tmp_path: Path, dtype: torch.dtype, limit: float
) -> None:
    with alone(tmp_path, "nccl") as group:
        found, expected = both(group, device=torch.device("cuda"), dtype=dtype)
    for mine, theirs in zip(found, expected, strict=True):
        error = (mine.float() - theirs.float()).norm() / theirs.float().norm()
        assert float(error) < limit, float(error)
