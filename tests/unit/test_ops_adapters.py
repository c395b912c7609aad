"""A linear map with a low-rank update, against the plain formula in float64."""

import pytest
import torch

from homeostat.ops import adapters
from homeostat.ops.adapters import adapted_linear

# More outputs than inputs, and fewer.
WIDE, TALL = (24, 200), (200, 24)


def parts(num_inputs, num_outputs, *, rows=400, rank=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)

    x, weight = drawn(rows, num_inputs), drawn(num_outputs, num_inputs)
    return x, weight, drawn(num_outputs), drawn(rank, num_inputs), drawn(num_outputs, rank)


def plain(x, weight, bias, a, b, *, scale, dropped=None):
    low = (x if dropped is None else dropped) @ a.T
    return x @ weight.T + bias + scale * (low @ b.T)


@pytest.mark.parametrize("sizes", [WIDE, TALL])
@pytest.mark.parametrize("has_dropout", [False, True])
@pytest.mark.parametrize("rank", [3, 8])
def test_values_and_gradients_are_those_of_the_formula(sizes, has_dropout, rank, monkeypatch):
    # Ranks of 8 are joined to the wide side.
    monkeypatch.setattr(adapters, "_LARGE", 0)
    x, weight, bias, a, b = parts(*sizes, rank=rank)
    found = []
    for function in (adapted_linear, plain):
        trained = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
        dropped = trained[0] * 0.5 if has_dropout else None
        out = function(trained[0], weight, bias, *trained[1:], scale=0.7, dropped=dropped)
        out.sin().sum().backward()
        found.append([out, *(tensor.grad for tensor in trained)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_more_dimensions_and_no_gradient_give_the_same():
    x, *rest = parts(*WIDE)
    wanted = plain(x, *rest, scale=2.0)
    with torch.no_grad():
        found = adapted_linear(x.view(4, 100, -1), *rest, scale=2.0)
    torch.testing.assert_close(found.flatten(0, 1), wanted)


@pytest.mark.parametrize("sizes", [WIDE, TALL])
def test_in_bf16_the_update_is_rounded_once_with_the_sum(sizes):
    x, *rest = parts(*sizes, dtype=torch.bfloat16)
    rest = [tensor.to(torch.bfloat16) for tensor in rest]
    wanted = plain(x.double(), *(tensor.double() for tensor in rest), scale=0.5)
    found = adapted_linear(x, *rest, scale=0.5).double()
    # low, and the result: two roundings of 2^-9 on sums of this size.
    assert (found - wanted).abs().max() < 2**-6 * wanted.abs().max()
