"""Ranks that share a row, on a GPU: block kernels against the reference, and two ranks on one GPU.

Each test has a twin on the CPU (tests/unit/test_sequence_parts.py, tests/parity/test_sequence.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest
import torch
from tests.support import sequence_gpu
from tests.support.sequence_blocks import expected_halves, joined_halves, random_qkv

from homeostat.train.sequence.blocks import block_kernel
from homeostat.train.sequence.ring import RingLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("chunks", [(70, 33, 33), (256,)])
@pytest.mark.parametrize(
    ("kernel", "dtype", "limit"), [("varlen", torch.bfloat16, 0.02), ("sdpa", torch.float32, 1e-4)]
)
def test_attention_to_parts_of_the_keys_joins_to_attention_to_all(
    kernel: str, dtype: torch.dtype, limit: float, chunks: tuple[int, ...]
) -> None:
    layout, scale = RingLayout.of(chunks, CUDA), 0.125
    qkv = random_qkv(layout.whole.num_tokens, 6, head_dim=64, device=CUDA, dtype=dtype)
    dout = torch.randn(layout.half.num_tokens, 6, 64, device=CUDA, dtype=dtype)
    block = block_kernel(kernel, device_type="cuda")
    out, lse, grads = joined_halves(block, layout, qkv, dout, scale=scale)
    expected, wanted = expected_halves(layout, qkv, dout, scale=scale)
    assert lse.dtype == torch.float32
    for found, right in zip((out, *grads), (expected, *wanted), strict=True):
        error = (found - right.detach()).norm() / right.detach().norm()
        assert float(error) < limit, float(error)


@pytest.mark.parametrize(("cp", "sp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(("kind", "limit"), [("bf16", 0.02), ("fp32", 1e-4)])
def test_two_ranks_on_one_gpu_attend_as_one(
    tmp_path: Path, cp: int, sp: int, kind: str, limit: float
) -> None:
    command = [sys.executable, "-m", sequence_gpu.__name__]
    args = [str(tmp_path), str(cp), str(sp), kind]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", *args], stdout=PIPE, stderr=STDOUT, text=True)
        for rank in range(2)
    ]
    logs = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], logs
    found = json.loads((tmp_path / f"result_{cp}_{sp}_{kind}.json").read_text())
    assert max(found["errors"]) < limit, found
