"""Rotations preserve length and relative position; norms equal their formula."""

import pytest
import torch
from tests.support.rounding import assert_right_to_rounding

from homeostat.ops.norms import rms_norm
from homeostat.ops.rope import RopeConfig, apply_rope, inverse_frequencies, rope_tables

ROPE = RopeConfig(theta=10_000.0)


def rotated(x, positions, rope=ROPE):
    inv_freq = inverse_frequencies(rope, head_dim=x.shape[-1])
    return apply_rope(x, *rope_tables(positions, inv_freq, rope))


def test_scores_depend_on_the_distance_only():
    # Fixed numbers: of random ones, some few have nearly equal scores at two distances.
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64, generator=generator)

    def score(at_q, at_k):
        turned_q, turned_k = rotated(q, torch.tensor([at_q])), rotated(k, torch.tensor([at_k]))
        return float((turned_q * turned_k).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)
    torch.testing.assert_close(rotated(q, torch.tensor([9])).norm(), q.norm())


def test_the_attention_factor_multiplies_the_rotation():
    x = torch.randn(3, 2, 8)
    positions = torch.arange(3)
    plain = rotated(x, positions)
    doubled = rotated(x, positions, RopeConfig(theta=10_000.0, attention_factor=2.0))
    torch.testing.assert_close(doubled, 2 * plain)


def test_frequencies_are_real_even_when_built_on_meta():
    with torch.device("meta"):
        inv_freq = inverse_frequencies(ROPE, head_dim=8)
    assert inv_freq.device.type == "cpu"
    torch.testing.assert_close(inv_freq, 10_000.0 ** (-torch.arange(0, 8, 2) / 8))


def test_bf16_is_rotated_in_fp32_and_rounded_once():
    x = torch.randn(64, 2, 32).bfloat16()
    positions = torch.arange(64) * 31
    exact = rotated(x.float(), positions)
    assert torch.equal(rotated(x, positions), exact.bfloat16())


def test_rms_norm_equals_its_formula():
    x, weight = torch.randn(5, 3, 16), torch.randn(16)
    wide = x.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    theirs = torch.nn.functional.rms_norm(x, (16,), weight, eps=1e-3)
    assert_right_to_rounding(rms_norm(x, weight, eps=1e-3), theirs, exact=want)


@pytest.mark.parametrize("shape", [(40, 96), (13, 3, 16), (1, 8), (0, 8)])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_gradient_of_rms_norm_equals_float64(shape, frozen):
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(shape[-1]).requires_grad_(not frozen)
    leaves = [x] if frozen else [x, weight]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    scale = weight.double() if frozen else wide[1]
    want = wide[0] / (wide[0].pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * scale
    out = rms_norm(x, weight, eps=1e-5)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, upstream)
    for ours, theirs in zip(got, torch.autograd.grad(want, wide, upstream.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


def test_rms_norm_in_bf16_is_rounded_from_fp32():
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
    want = rms_norm(x.float(), weight.float(), eps=1e-5)
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-5).float(), want, atol=1e-3, rtol=2**-7)


@pytest.mark.parametrize("heads_first", [False, True])
def test_the_gradient_of_a_rotation_is_exact(heads_first):
    shape = (2, 5, 8) if heads_first else (5, 2, 8)
    x = torch.randn(shape, dtype=torch.float64)
    x = (x.transpose(0, 1) if heads_first else x).requires_grad_()
    positions = torch.arange(5) * 3
    rope = RopeConfig(theta=100.0, attention_factor=1.3)
    assert torch.autograd.gradcheck(lambda x: rotated(x, positions, rope), (x,))
