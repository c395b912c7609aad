"""Ranks on a GPU: offloaded weights and Adam (NCCL, one rank), and divided experts (gloo, two).

The CPU runs the same in tests/parity/test_scale.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest
import torch
from tests.support import experts_gpu, tiny, tiny_moe_runs

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_rank_that_offloads_trains_the_same_model_in_less_memory(tmp_path: Path) -> None:
    """The benchmark compares the losses, and exits with 1 if they differ."""
    code = (
        "import sys; sys.path.insert(0, 'bench'); import common, rank_offload; from pathlib import "
        f"Path; common.RESULTS_DIR = Path({str(tmp_path)!r}); rank_offload.main()"
    )
    command = [sys.executable, "-c", code, "--device", "cuda", "--layers", "6"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=PIPE, stderr=STDOUT, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads((tmp_path / "rank_offload_cuda.json").read_text())
    peaks = [found[name]["peak_bytes"] for name in ("on the device", "offload_optimizer")]
    assert peaks[1] < peaks[0]
    assert found["offload_params"]["peak_bytes"] < peaks[1]


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-5), ("bf16", 0.01)])
def test_two_ranks_that_share_experts_compute_what_a_local_trainer_does(
    tmp_path: Path, precision: str, limit: float
) -> None:
    tiny.write_model(tmp_path / "model", **tiny_moe_runs.EXPERTS["dots1"])
    command = [sys.executable, "-m", experts_gpu.__name__]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path), precision],
            cwd=ROOT,
            stdout=PIPE,
            stderr=STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    logs = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], logs
    for step in json.loads((tmp_path / f"result_{precision}.json").read_text()):
        print(step)
        assert step["loss"][0] == pytest.approx(step["loss"][1], rel=limit)
        assert step["grad_norm"][0] == pytest.approx(step["grad_norm"][1], rel=10 * limit)
        assert step["moved"] == 0 or precision == "bf16"
