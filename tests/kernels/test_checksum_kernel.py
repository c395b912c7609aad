"""Checksums of many tensors by one kernel against the plain sums, tensor by tensor."""

from __future__ import annotations

import os

import pytest
import torch

from homeostat.ops import kernels
from homeostat.sync.checksum import tensor_checksum, tensor_checksums

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device or Triton's interpreter (tests/unit/test_ops_kernels.py)",
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_one_kernel_gives_the_checksum_of_every_tensor() -> None:
    """Of sizes around a row of 32 KiB and odd ones, any dtype, offset and strides, and all bits."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randint(0, 256, (200_000,), dtype=torch.uint8, generator=generator).to(DEVICE)
    sizes = [0, 1, 7, 8, 32_767, 32_768, 32_769, 65_536, 100_001]
    tensors = [flat[:size] for size in sizes] + [flat[3:20_000], flat[8:40_008].view(torch.int16)]
    base = flat[: 64 * 128 * 2].view(torch.bfloat16).view(64, 128)
    tensors += [base, base.T, base[::2, 1::3], torch.full((9,), float("nan"), device=DEVICE)]
    with kernels.plain():
        wanted = [tensor_checksum(tensor) for tensor in tensors]
    assert kernels.fused(torch.empty(0, device=DEVICE))
    assert tensor_checksums(tensors) == wanted
    assert len(set(wanted)) > len(sizes)
