"""FP8 on a GPU: quantised bits are those of a CPU, and products are near the emulated ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from homeostat.ops.experts import experts_of
from homeostat.precision.fp8 import quantise
from homeostat.precision.fp8_experts import Fp8Experts
from homeostat.precision.operands import Emulation, TensorCores
from homeostat.precision.recipe import E4M3, E5M2, Fp8Recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
SCALINGS = ("blockwise", "rowwise", "tensorwise")


def numbers(seed: int) -> Tensor:
    """Numbers of many magnitudes, with zeros, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(267, 331, generator=generator)
    x *= torch.exp2(torch.randint(-40, 30, x.shape, generator=generator).float())
    x[::11] = 0.0
    x[3, :4] = torch.tensor([1e-40, -1e-42, 2.0**-126, -0.0])
    if seed % 2:
        x[5, 7], x[6, 140], x[7, 3] = torch.inf, -torch.inf, torch.nan
    return x


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_kernels_and_plain_code_have_the_bits_of_the_cpu(scaling, power_of_two) -> None:
    recipe = Fp8Recipe(scaling, power_of_two=power_of_two)
    for seed in range(4):
        x, dtype = numbers(seed), E5M2 if seed > 1 else E4M3
        for is_weight in (False, True):
            block = recipe.weights if is_weight else recipe.rows
            how = {"block": block, "dtype": dtype, "power_of_two": power_of_two}
            pair = TensorCores().operands(x.to(CUDA), recipe, dtype, is_weight=is_weight)
            for source, copy in zip((x, x.t()), pair, strict=True):
                expected, there = quantise(source, **how), quantise(source.to(CUDA), **how)
                rows, columns = source.shape
                codes = expected.values.view(torch.uint8)
                assert torch.equal(there.values.cpu().view(torch.uint8), codes)
                assert torch.equal(copy.values[:rows, :columns].cpu().view(torch.uint8), codes)
                scales = expected.scales.nan_to_num(-1.0)
                assert torch.equal(there.scales.cpu().nan_to_num(-1.0), scales)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_are_near_the_emulated_ones(scaling) -> None:
    recipe = Fp8Recipe(scaling)
    generator = torch.Generator().manual_seed(0)
    # No size divides by 128.
    x = torch.randn(300, 576, generator=generator).bfloat16()
    weight = torch.randn(200, 576, generator=generator).bfloat16()
    grad = torch.randn(300, 200, generator=generator).bfloat16()
    found = []
    for arithmetic, device in ((Emulation(), "cpu"), (TensorCores(), CUDA)):
        x_rows, x_columns = arithmetic.operands(x.to(device), recipe, E4M3)
        both = arithmetic.operands(weight.to(device), recipe, E4M3, is_weight=True)
        g_rows, g_columns = arithmetic.operands(grad.to(device), recipe, E4M3)
        cases = (
            (x_rows, both[0], (300, 200)),
            (g_rows, both[1], (300, 576)),
            (g_columns, x_columns, (200, 576)),
        )
        found.append(
            [
                arithmetic.product(a, b, recipe, sizes=sizes, fast=False).float().cpu()
                for a, b, sizes in cases
            ]
        )
    for emulated, product in zip(*found, strict=True):
        assert emulated.shape == product.shape
        assert float((emulated - product).norm() / emulated.norm()) < 5e-3


@pytest.mark.parametrize("scaling", SCALINGS)
def test_experts_are_near_the_emulated_ones(scaling) -> None:
    recipe = Fp8Recipe(scaling)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 192, generator=generator).bfloat16()
    gate_up = (torch.randn(4, 320, 192, generator=generator) / 14).bfloat16()
    down = (torch.randn(4, 192, 160, generator=generator) / 13).bfloat16()
    ids = torch.randn(150, 4, generator=generator).topk(2).indices
    weights = torch.rand(150, 2, generator=generator)
    found = []
    for device in ("cpu", CUDA):
        leaves = [t.to(device).requires_grad_() for t in (x, gate_up, down)]
        layer = Fp8Experts("experts", recipe, device=torch.device(device))
        how = {"numerics": "fast", "kernel": "grouped"}
        out = layer(leaves[0], ids.to(device), weights.to(device), *leaves[1:], **how)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        found.append([t.float().cpu().detach() for t in (out, *grads)])
    plain = experts_of(x, ids, weights, gate_up, down).float().detach()
    for emulated, ours in zip(*found, strict=True):
        assert float((emulated - ours).norm() / emulated.norm()) < 2e-2
    assert float((found[1][0] - plain).norm() / plain.norm()) < 0.09
