"""Weights by NCCL on a GPU; tests/contract has CUDA IPC."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from homeostat.sync.collective import CollectiveTransport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]


def test_a_broadcast_by_nccl_without_receivers_sends_again_and_again(tmp_path: Path) -> None:
    """NCCL refuses two ranks on one GPU: the group is the sender's alone."""
    device = torch.device("cuda", 0)
    transport = CollectiveTransport(tmp_path / "meeting", 4096, 0, device, 60.0, "127.0.0.1")
    packer = transport.packer()
    weights = {f"w{i}": torch.randn(900, device=device) for i in range(5)}
    for _ in range(2):
        buckets = list(packer.pack(weights.items()))
        assert [entry.name for bucket in buckets for entry in bucket.entries] == list(weights)
    packer.close()
    assert not (tmp_path / "meeting").exists()
