"""FP8 quantisation against numpy, and what it makes of zeros and of numbers that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support import tiny
from torch import Tensor

from homeostat.config.fp8 import SCALES_VARIABLE, Fp8Config
from homeostat.config.loading.resume import compare_configs
from homeostat.precision import operands
from homeostat.precision.fp8 import Quantised, dequantise, quantise
from homeostat.precision.history import AmaxHistory
from homeostat.precision.recipe import BLOCK, E4M3, E5M2, Fp8Recipe

# The bits of a format's mantissa, its smallest exponent, and its largest number.
FORMATS = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}
BLOCKS = {"blockwise": (1, BLOCK), "square": (BLOCK, BLOCK), "row": (1, None), "all": (None, None)}


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The nearest number of a format, ties to even, computed from exponents in float64."""
    mantissa, smallest, limit = FORMATS[dtype]
    x = np.clip(x.astype(np.float64), -limit, limit)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.abs(x)))
    step = 2.0 ** (np.maximum(np.nan_to_num(exponent, neginf=smallest), smallest) - mantissa)
    return np.round(x / step) * step


def reference(x: np.ndarray, block, dtype: torch.dtype, power_of_two: bool):
    """Values and scales of each block by itself."""
    rows, columns = block[0] or x.shape[0], block[1] or x.shape[1]
    values = np.zeros_like(x)
    scales = np.zeros((-(-x.shape[0] // rows), -(-x.shape[1] // columns)), np.float32)
    limit = np.float32(FORMATS[dtype][2])
    for i, j in np.ndindex(*scales.shape):
        at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        largest = np.maximum(np.abs(x[at]).max(), np.float32(2.0**-100))
        scale, inverse = largest / limit, limit / largest
        if power_of_two:
            scale = np.float32(2.0) ** np.ceil(np.log2(scale.astype(np.float64)))
            inverse = np.float32(1.0) / np.float32(scale)
        scales[i, j] = scale
        values[at] = rounded(x[at] * inverse, dtype)
    return values, scales


def numbers(seed: int, *shape: int) -> Tensor:
    """Numbers over many orders of magnitude, with zeros, subnormals and rows of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    x = x * torch.exp2(torch.randint(-30, 20, shape, generator=generator).float())
    x[::7] = 0.0
    x[1, ::3] = 0.0
    x[2, :5] = torch.tensor([1e-40, -1e-42, 1e-45, 2.0**-126, -0.0])
    return x


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_values_and_scales_are_numpys(block, dtype, power_of_two) -> None:
    x = numbers(0, 150, 300)
    found = quantise(x, block=block, dtype=dtype, power_of_two=power_of_two)
    values, scales = reference(x.numpy(), block, dtype, power_of_two)
    assert found.values.dtype == dtype
    np.testing.assert_array_equal(found.values.float().numpy(), values)
    np.testing.assert_array_equal(found.scales.numpy(), scales)
    there = dequantise(found)
    assert there.shape == x.shape
    assert torch.isfinite(there).all()


def test_every_code_of_the_format_is_its_own_nearest_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    finite = codes[codes.isfinite()].reshape(1, -1)
    found = quantise(finite, block=(None, None))
    assert torch.equal(found.values.float(), finite)
    assert found.scales.item() == 1.0


def test_rows_of_zeros_do_not_divide_by_zero() -> None:
    for block in BLOCKS.values():
        for power_of_two in (False, True):
            found = quantise(torch.zeros(3, 200), block=block, power_of_two=power_of_two)
            assert torch.equal(dequantise(found), torch.zeros(3, 200))
            assert (found.scales > 0).all()
            assert found.scales.isfinite().all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_number_that_is_not_finite_is_never_hidden(bad: float) -> None:
    x = numbers(1, 4, 256)
    x[3, 200] = bad
    found = dequantise(quantise(x, block=(1, BLOCK)))
    assert found[3, 128:].isnan().all()
    assert found[:3].isfinite().all()
    assert found[3, :128].isfinite().all()
    # Under a scale that was given, nothing else is touched.
    given = quantise(x, block=(None, None), amax=torch.tensor([1.0]))
    assert given.values.float().isnan().sum() == 1
    assert given.values.view(torch.uint8)[3, 200] == 0x7F


def test_a_scale_that_is_given_cuts_what_is_larger() -> None:
    x = torch.tensor([[0.5, 1.0, 3.0, -8.0]])
    found = dequantise(quantise(x, block=(None, None), amax=torch.tensor([2.0])))
    assert found.tolist() == [[0.5, 1.0, 2.0, -2.0]]


def test_stacks_are_quantised_matrix_by_matrix() -> None:
    x = numbers(2, 3 * 40, 130).view(3, 40, 130)
    whole = quantise(x, block=(BLOCK, BLOCK))
    for number in range(3):
        one = quantise(x[number], block=(BLOCK, BLOCK))
        assert torch.equal(whole.values[number].float(), one.values.float())
        assert torch.equal(whole.scales[number], one.scales)


def error(found: Quantised, x: Tensor) -> float:
    return float((dequantise(found) - x).norm() / x.norm())


def test_smaller_blocks_are_closer_where_magnitudes_differ() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(3))
    x[:, :128] *= 2e-5
    small = x[:, :128]
    fine, coarse = (quantise(x, block=block) for block in ((1, BLOCK), (None, None)))
    cut = [Quantised(q.values[:, :128], q.scales[:, :1], q.block) for q in (fine, coarse)]
    assert error(cut[0], small) < 0.04 < error(cut[1], small)


@pytest.mark.parametrize(
    ("settings", "variable", "is_power"),
    [
        ({}, None, False),
        ({}, "1", False),
        ({}, "0", True),
        ({"power_of_two_scales": True}, "1", True),
        ({"power_of_two_scales": False}, "0", False),
    ],
)
def test_the_variable_speaks_where_the_recipe_is_silent(settings, variable, is_power) -> None:
    environment = {} if variable is None else {SCALES_VARIABLE: variable}
    config = Fp8Config(**settings)
    recipe = Fp8Recipe.of(config, environment)
    assert recipe.power_of_two is is_power
    line = recipe.describe(config, environment)
    assert (SCALES_VARIABLE in line) is (variable is not None)
    assert ("overridden" in line) is (variable is not None and bool(settings))


def test_a_run_records_the_scales_that_the_environment_asked_for(tmp_path, monkeypatch) -> None:
    """So a resume without the variable is told of the change, and so are its workers."""
    silent = tiny.config(tmp_path, "trainer.fp8={}")
    assert silent.trainer.fp8.power_of_two_scales is None
    for word, wanted in (("0", True), ("1", False)):
        monkeypatch.setenv(SCALES_VARIABLE, word)
        followed = tiny.config(tmp_path, "trainer.fp8={}")
        assert followed.trainer.fp8.power_of_two_scales is wanted
        assert "is followed" in Fp8Recipe.of(followed.trainer.fp8).describe(followed.trainer.fp8)
        (change,) = compare_configs(followed, silent)
        assert (change.path, change.resume) == ("trainer.fp8.power_of_two_scales", "warn")
        own = f"trainer.fp8={{power_of_two_scales: {str(not wanted).lower()}}}"
        assert tiny.config(tmp_path, own).trainer.fp8.power_of_two_scales is not wanted
        assert tiny.config(tmp_path).trainer.fp8 is None


def test_a_product_without_its_padding_lies_as_a_plain_one_does(monkeypatch) -> None:
    """Decode kernels read rows one after the other."""
    padded = torch.arange(6.0 * 8).view(6, 8)
    monkeypatch.setattr(operands, "_blockwise", lambda *_: padded)
    operand = operands.Operand(padded, torch.ones(1))
    found = operands.TensorCores().product(
        operand, operand, Fp8Recipe("blockwise"), sizes=(5, 7), fast=False
    )
    assert found.is_contiguous()
    assert torch.equal(found, padded[:5, :7])


def test_a_history_of_updates_of_zeros_is_resumed_as_one() -> None:
    """The gradient below a value head that starts at zero is zero at first."""
    whole, resumed = (AmaxHistory(3, limit=448.0, device=torch.device("cpu")) for _ in range(2))
    whole.restored()
    assert whole.expected is None
    whole.now(records=True)
    whole.end_update(applied=True)
    resumed.values.copy_(whole.values)
    resumed.restored()
    assert whole.expected is not None
    assert resumed.expected is not None
    assert whole.expected.item() == resumed.expected.item() == 448


def test_a_run_that_goes_back_to_before_its_first_record_has_no_scales_from_later() -> None:
    history = AmaxHistory(3, limit=448.0, device=torch.device("cpu"))
    amax = history.now(records=True)
    assert amax.record is not None
    amax.record.fill_(7.0)
    history.end_update(applied=True)
    assert history.expected is not None
    history.values.zero_()
    history.restored()
    assert history.expected is None
