"""AdamW in one pass against the same in plain torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from homeostat.ops import kernels
from homeostat.ops.adamw import adamw_
from homeostat.ops.adamw_step import AdamWStep
from homeostat.ops.moments import Moment, read_moment, zero_moment
from homeostat.ops.stochastic import Noise

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device or Triton's interpreter (tests/unit/test_ops_kernels.py)",
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def updated(
    kind: Any, dtype: torch.dtype, *, count: int, plain: bool, measure: bool
) -> tuple[torch.Tensor, list[Moment], torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(count, generator=generator).to(DEVICE, dtype)
    moments = [zero_moment(master, kind, signed=signed, device=DEVICE) for signed in (True, False)]
    norm = None
    for step in range(1, 4):
        grad = torch.randn(count, generator=generator).to(DEVICE)
        grad *= torch.linspace(0, 1, count, device=DEVICE)
        how = AdamWStep(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, decay=0.1, step=step)
        noise = {"noise": Noise(99 + step, start=512), "measure": measure}
        if plain:
            with kernels.plain():
                norm = adamw_(master, grad, *moments, how=how, **noise)
        else:
            assert kernels.fused(grad)
            norm = adamw_(master, grad, *moments, how=how, **noise)
    return master, moments, norm


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("fp32", torch.float32),
        ("8bit", torch.float32),
        ("bf16", torch.bfloat16),
        pytest.param("bf16", torch.float32, marks=pytest.mark.slow),
        pytest.param("fp32", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("8bit", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_is_the_plain_update(kind: Any, dtype: torch.dtype) -> None:
    """A moment that is a rounding apart may get another code or neighbour; few do."""
    how = {"count": 2500, "measure": True}
    wanted, expected, norm = updated(kind, dtype, plain=True, **how)
    found, moments, measured = updated(kind, dtype, plain=False, **how)
    assert norm is not None
    assert measured is not None
    assert float(measured) == pytest.approx(float(norm), rel=1e-4)
    near = 1e-5 if dtype == torch.float32 else 2.0**-7
    apart = ((found.float() - wanted.float()).abs() > near * (1 + wanted.float().abs())).float()
    assert float(apart.mean()) < 0.005
    for one, other in zip(moments, expected, strict=True):
        if kind == "fp32":
            torch.testing.assert_close(one.values, other.values, rtol=1e-5, atol=1e-7)
        else:
            differs = (one.values != other.values).float().mean()
            assert float(differs) < 0.005
            distance = read_moment(one) - read_moment(other)
            assert float(distance.norm()) < 0.01 * float(read_moment(other).norm())


def test_pieces_are_updated_as_the_whole_is_to_the_bit() -> None:
    """Cut at blocks: what host memory relies on."""
    for kind, dtype in (("8bit", torch.float32), ("bf16", torch.bfloat16)):
        generator = torch.Generator().manual_seed(1)
        start, grad = (torch.randn(3000, generator=generator).to(DEVICE) for _ in range(2))
        how = AdamWStep(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, decay=0.1, step=1)
        results = []
        for cuts in ([(0, 3000)], [(0, 1024), (1024, 1280), (1280, 3000)]):
            master = start.to(dtype, copy=True)
            moments = [
                zero_moment(master, kind, signed=signed, device=DEVICE) for signed in (True, False)
            ]
            for first, last in cuts:
                parts = [moment.part(first, last) for moment in moments]
                noise = Noise(5).shifted(first)
                adamw_(master[first:last], grad[first:last], *parts, how=how, noise=noise)
            results.append((master, *(moment.values for moment in moments)))
        for whole, pieces in zip(*results, strict=True):
            assert torch.equal(whole, pieces)
