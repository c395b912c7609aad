"""Linear maps with low-rank updates, against the plain formula in float64."""

import pytest
import torch

from homeostat.models.lora_layers import DoraLinear
from homeostat.ops.adapters import (
    AdaptedLinear,
    Factors,
    adapted_linear,
    adapted_linears,
    outputs_of,
)
from homeostat.ops.linear import Linear

# More outputs than inputs, and fewer.
WIDE, TALL = (24, 200), (200, 24)
# Outputs of maps of one input: more than its 24 numbers in all, and fewer.
GROUPS = [(40, 8, 16), (30, 30), (9, 7)]


def drawn(*sizes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)


def factors(num_inputs, num_outputs, *, rank=3, seed=0, dtype=torch.float64):
    how = {"seed": seed, "dtype": dtype}
    return Factors(
        drawn(num_outputs, num_inputs, **how),
        drawn(num_outputs, **how),
        drawn(rank, num_inputs, **how),
        drawn(num_outputs, rank, **how),
    )


def plain(x, one, *, scale, dropped=None):
    low = (x if dropped is None else dropped) @ one.a_RK.T
    return x @ one.weight_OK.T + one.bias_O + scale * (low @ one.b_OR.T)


def trained(one):
    a, b = (tensor.clone().requires_grad_() for tensor in (one.a_RK, one.b_OR))
    return Factors(one.weight_OK, one.bias_O, a, b)


def all_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("sizes", [WIDE, TALL])
@pytest.mark.parametrize("has_dropout", [False, True])
@pytest.mark.parametrize("rank", [3, 8])
def test_values_and_gradients_are_those_of_the_formula(sizes, has_dropout, rank):
    """Ranks of 8 are joined to the wide side."""
    found = []
    for function in (adapted_linear, plain):
        x, one = drawn(400, sizes[0]).requires_grad_(), trained(factors(*sizes, rank=rank))
        out = function(x, one, scale=0.7, dropped=x * 0.5 if has_dropout else None)
        out.sin().sum().backward()
        found.append([out, x.grad, one.a_RK.grad, one.b_OR.grad])
    all_equal(*found)


@pytest.mark.parametrize("outputs", GROUPS)
@pytest.mark.parametrize("rank", [3, 8])
def test_maps_of_one_input_give_what_each_gives_alone(outputs, rank):
    found = []
    for is_joint in (True, False):
        x = drawn(50, 24).requires_grad_()
        maps = [
            trained(factors(24, size, rank=rank, seed=seed)) for seed, size in enumerate(outputs)
        ]
        if is_joint:
            outs = adapted_linears(x, maps, scale=0.7)
        else:
            outs = [plain(x, one, scale=0.7) for one in maps]
        sum(out.sin().sum() * (2 + number) for number, out in enumerate(outs)).backward()
        grads = [grad for one in maps for grad in (one.a_RK.grad, one.b_OR.grad)]
        found.append([*outs, x.grad, *grads])
    all_equal(*found)


def test_an_output_that_is_not_used_has_no_part_in_the_gradient():
    x, maps = drawn(50, 24).requires_grad_(), [trained(factors(24, 40, seed=s)) for s in (0, 1)]
    adapted_linears(x, maps, scale=0.7)[0].sum().backward()
    wanted = drawn(50, 24).requires_grad_()
    plain(wanted, maps[0], scale=0.7).sum().backward()
    torch.testing.assert_close(x.grad, wanted.grad)
    assert not maps[1].a_RK.grad.any()


class Adapted(AdaptedLinear):
    """A map whose update is computed with others, or alone."""

    def __init__(self, one, scaling, *, is_alone=False):
        super().__init__(*reversed(one.weight_OK.shape), bias=False, numerics="fast")
        self.one, self.scaling, self.is_alone = one, scaling, is_alone

    def factors(self):
        return None if self.is_alone else self.one

    def forward(self, x):
        return plain(x, self.one, scale=self.scaling)


@pytest.mark.parametrize("alone", [(), (1,), (0, 1, 2)])
def test_outputs_come_in_the_order_of_the_maps(alone):
    x = drawn(5, 24)
    maps = [
        Adapted(factors(24, 10 + place, seed=place), 0.5, is_alone=place in alone)
        for place in range(3)
    ]
    bare = Linear(24, 7, bias=True, numerics="fast", dtype=torch.float64)
    maps.insert(1, bare)
    all_equal(outputs_of(x, maps), [one(x) for one in maps])


def test_maps_of_different_scales_are_computed_by_themselves():
    x, maps = drawn(5, 24), [Adapted(factors(24, 10), scale) for scale in (0.5, 2.0)]
    all_equal(outputs_of(x, maps), [one(x) for one in maps])


def test_dora_is_computed_by_itself():
    assert DoraLinear.factors(None) is None


def test_more_dimensions_and_no_gradient_give_the_same():
    x, one = drawn(400, WIDE[0]), factors(*WIDE)
    with torch.no_grad():
        found = adapted_linear(x.view(4, 100, -1), one, scale=2.0)
    torch.testing.assert_close(found.flatten(0, 1), plain(x, one, scale=2.0))


@pytest.mark.parametrize("sizes", [WIDE, TALL])
def test_in_bf16_the_update_is_rounded_once_with_the_sum(sizes):
    how = {"dtype": torch.bfloat16}
    x, one = drawn(400, sizes[0], **how), factors(*sizes, **how)
    parts = (one.weight_OK, one.bias_O, one.a_RK, one.b_OR)
    wanted = plain(x.double(), Factors(*(part.double() for part in parts)), scale=0.5)
    found = adapted_linear(x, one, scale=0.5).double()
    # low, and the result: two roundings of 2^-9 on sums of this size.
    assert (found - wanted).abs().max() < 2**-6 * wanted.abs().max()
