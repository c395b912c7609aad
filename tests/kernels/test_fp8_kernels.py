"""Quantisation kernels against the plain code, and grouped FP8 products.

Triton's interpreter casts to FP8 correctly only what FP8 holds exactly, so the numbers here are
such; tests/gpu/test_gpu_fp8.py compares all others, on a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from homeostat.ops.kernels.fp8 import quantised_copies
from homeostat.ops.kernels.fp8_grouped import grouped_fp8
from homeostat.ops.pairs import pairs_of
from homeostat.precision.fp8 import quantise
from homeostat.precision.recipe import BLOCK, E4M3, E5M2

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device or Triton's interpreter (tests/unit/test_ops_kernels.py)",
)

SCOPES = {
    "block": (1, BLOCK),
    "square": (BLOCK, BLOCK),
    "row": (1, None),
    "tensor": (None, None),
}
LARGEST = 1.75


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that FP8 holds exactly under a scale by LARGEST, which is in every block."""
    generator = torch.Generator().manual_seed(seed)
    quarter = torch.randint(0, 4, shape, generator=generator) / 4
    x = (1 + quarter) * torch.exp2(-torch.randint(0, 12, shape, generator=generator).float())
    x *= 1 - 2 * torch.randint(0, 2, shape, generator=generator)
    row, column = torch.meshgrid(*(torch.arange(size) for size in shape[-2:]), indexing="ij")
    x = torch.where((row + column) % 4 == 0, LARGEST, x)
    x[..., ::5, :] = 0.0
    return x.to(DEVICE)


def scales_of(scales: Tensor, scope: str, grid: torch.Size) -> Tensor:
    """The kernel's scales as the plain code has them."""
    turned = scales.t() if scope == "block" else scales
    return turned.reshape(len(turned), -1)[: grid[0], : grid[1]]


@pytest.mark.parametrize("scope", SCOPES)
def test_copies_have_the_bits_of_the_plain_code(scope: str) -> None:
    x = numbers(136, 150)
    dtype = E5M2 if scope == "row" else E4M3
    multiple = 128 if scope in ("block", "square") else 16
    for power_of_two in (False, True):
        how = {"dtype": dtype, "power_of_two": power_of_two}
        pair = quantised_copies(x, scope=scope, multiple=multiple, **how)
        for source, copy in zip((x, x.t()), pair, strict=True):
            expected = quantise(source, block=SCOPES[scope], **how)
            rows, columns = source.shape
            assert [size % multiple for size in copy.values.shape] == [0, 0]
            assert torch.equal(copy.values[:rows, :columns].float(), expected.values.float())
            assert not copy.values[rows:].float().any()
            assert not copy.values[:, columns:].float().any()
            found = scales_of(copy.scales, scope, expected.scales.shape)
            assert torch.equal(found, expected.scales)
            assert copy.scales.isfinite().all()


def test_a_scale_of_what_is_not_finite_is_nan() -> None:
    x = numbers(136, 150)
    x[7, 3], x[8, 140] = torch.inf, torch.nan
    how = {"dtype": E4M3, "power_of_two": False}
    copy, _ = quantised_copies(x, scope="block", multiple=128, **how)
    expected = quantise(x, block=SCOPES["block"], **how).scales
    assert torch.equal(copy.scales.t()[:136].isnan(), expected.isnan())
    assert expected.isnan().sum() == 2


def test_a_delayed_scale_cuts_and_the_largest_number_is_recorded() -> None:
    x = numbers(40, 36)
    amax, record = (torch.tensor([one], device=DEVICE) for one in (LARGEST / 4, 0.5))
    how = {"scope": "tensor", "dtype": E4M3, "power_of_two": False, "multiple": 16}
    by_rows, by_columns = quantised_copies(x, **how, amax=amax, record=record, columns=False)
    assert by_columns is None
    expected = quantise(x, block=(None, None), amax=amax)
    assert torch.equal(by_rows.values[:40, :36].float(), expected.values.float())
    assert record.item() == LARGEST


def test_copies_can_be_written_again_in_place() -> None:
    first, second = numbers(20, 40), numbers(20, 40, seed=1)
    how = {"scope": "square", "dtype": E4M3, "power_of_two": False, "multiple": 128}
    pair = quantised_copies(first, **how)
    addresses = [copy.values.data_ptr() for copy in pair]
    again = quantised_copies(second, **how, into=pair)
    assert [copy.values.data_ptr() for copy in again] == addresses
    fresh = quantised_copies(second, **how)
    assert torch.equal(again[1].values.float(), fresh[1].values.float())


def test_grouped_products_multiply_rows_by_their_experts_matrices() -> None:
    x, stack = numbers(90, 256), numbers(3, 128, 256, seed=1)
    ids = torch.randint(0, 3, (90, 1), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ids[ids == 1] = 0
    pairs = pairs_of(ids, 3, like=x)
    rows = x[pairs.order_S]
    how = {"dtype": E4M3, "power_of_two": False, "multiple": 128, "columns": False}
    a, _ = quantised_copies(rows, scope="block", **how)
    copies = [quantised_copies(matrix, scope="square", **how)[0] for matrix in stack]
    values = torch.stack([copy.values for copy in copies])
    scales = torch.stack([copy.scales for copy in copies])
    found = grouped_fp8(a.values, a.scales, values, scales, pairs)
    expert = ids.flatten()[pairs.order_S]
    expected = torch.einsum("sk,sok->so", rows, stack[expert])
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
