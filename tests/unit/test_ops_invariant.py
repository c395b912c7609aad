"""The parts of the invariant numerics: right to rounding, and every row by itself."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rounding import assert_right_to_rounding
from torch.nn import functional

from homeostat.ops.activations import gated, gated_silu, invariant_tanh
from homeostat.ops.attention import Limits, PackedLayout, packed_attention
from homeostat.ops.linear import TILE_ROWS, Linear, linear
from homeostat.ops.norms import rms_norm
from homeostat.ops.rope import RopeConfig, apply_rope, inverse_frequencies, rope_tables
from homeostat.ops.tiled_attention import TiledAttention, TilePlan, tiled_attention

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 3])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def require_rows_alone(function, *inputs):
    """Any choice of rows gives the bits that these rows have among all of them."""
    whole = function(*inputs)
    num_rows = inputs[0].shape[0]
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 100, num_rows - 1):
        rows = torch.randperm(num_rows, generator=generator)[:size]
        assert torch.equal(function(*(x[rows] for x in inputs)), whole[rows]), size


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 33), (31, 1), (64, 3), (128, 384), (576, 192)])
def test_a_row_of_a_linear_map_does_not_depend_on_the_others(num_threads, inputs, outputs):
    x, weight, bias = torch.randn(300, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    require_rows_alone(lambda x: linear(x, weight, bias, numerics="invariant"), x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(70, 24), (2, 5, 24), (0, 24)])
@pytest.mark.parametrize("outputs", [2, 40])
def test_an_invariant_linear_map_is_the_linear_map(shape, outputs, bias):
    layer = Linear(24, outputs, bias=bias, numerics="invariant")
    x = torch.randn(shape, requires_grad=True)
    out = layer(x)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, *layer.parameters()), upstream)
    wide = [t.detach().double().requires_grad_() for t in (x, *layer.parameters())]
    want = functional.linear(*wide)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(got, torch.autograd.grad(want, wide, upstream.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=1e-5)


def test_a_frozen_weight_costs_no_gradient():
    layer = Linear(8, 8, bias=False, numerics="invariant").requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, 8))


@pytest.mark.parametrize("width", [24, 97, 128])
def test_what_works_row_by_row_does_so_to_the_bit(num_threads, width):
    x, y, weight = torch.randn(999, width) * 3, torch.randn(999, width), torch.randn(width)
    for act in ("silu", "gelu_tanh"):
        how = {"activation": act, "numerics": "invariant"}
        require_rows_alone(partial(gated, **how), x, y)
    require_rows_alone(invariant_tanh, x)
    require_rows_alone(lambda x: rms_norm(x, weight, eps=1e-5), x)


@pytest.mark.parametrize("head_dim", [4, 12, 64])
def test_a_rotation_does_not_depend_on_the_other_tokens(num_threads, head_dim):
    rope = RopeConfig(theta=10_000.0)
    inv_freq = inverse_frequencies(rope, head_dim=head_dim)
    x, positions = torch.randn(999, 3, head_dim), torch.randint(0, 5000, (999,))
    weight = torch.randn(head_dim)
    require_rows_alone(lambda x, p: apply_rope(x, *rope_tables(p, inv_freq, rope)), x, positions)
    require_rows_alone(lambda x: rms_norm(x, weight, eps=1e-5), x)


def test_the_invariant_tanh_equals_float64():
    x = torch.cat([torch.linspace(-1, 1, 4001), torch.tensor([-200.0, -9.0, 9.0, 200.0])])
    want = x.double().tanh()
    error = (invariant_tanh(x) - want).abs()
    assert (error <= 2e-7).all()
    # Small values do not cancel.
    assert (error <= 1e-6 * want.abs()).all()


def test_the_invariant_gelu_and_its_gradient_equal_float64():
    gate = torch.cat([torch.randn(500) * 5, torch.tensor([-200.0, 0.0, 200.0])]).requires_grad_()
    wide = gate.detach().double().requires_grad_()
    up = torch.ones_like(gate)
    out = gated(gate, up, activation="gelu_tanh", numerics="invariant")
    want = functional.gelu(wide, approximate="tanh")
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-6)
    (ours,), (theirs,) = torch.autograd.grad(out.sum(), gate), torch.autograd.grad(want.sum(), wide)
    torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-6)


def test_the_invariant_silu_and_its_gradient_equal_float64():
    gate = torch.cat([torch.randn(500) * 5, torch.tensor([-200.0, -88.8, 0.0, 88.8, 200.0])])
    up = torch.randn_like(gate)
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out = gated_silu(*leaves, numerics="invariant")
    want = functional.silu(wide[0]) * wide[1]
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-6)
    got = torch.autograd.grad(out.sum(), leaves)
    for ours, theirs in zip(got, torch.autograd.grad(want.sum(), wide), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-6)


def qkv(num_tokens, *, heads, kv_heads, dim=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads, kv_heads, kv_heads)
    return [torch.randn(num_tokens, count, dim, generator=generator) for count in sizes]


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=20),
    groups=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    seed=st.integers(0, 10**6),
    limits=st.sampled_from([Limits(), Limits(7), Limits(70), Limits(None, 2.0), Limits(9, 0.5)]),
)
def test_tiled_attention_equals_eager_in_float64(lengths, groups, seed, limits):
    layout = PackedLayout.of(lengths, CPU)
    tensors = qkv(layout.num_tokens, heads=groups[0], kv_heads=groups[1], seed=seed)
    wide = [x.double() for x in tensors]
    context = TiledAttention.of(layout, num_kv_heads=groups[1])
    out = context.attend(0, *tensors, scale=0.3, limits=limits)
    want = packed_attention(*wide, layout, scale=0.3, kernel="eager", limits=limits)
    torch.testing.assert_close(out.double(), want.double(), atol=1e-5, rtol=1e-5)


def test_the_gradients_of_tiled_attention_equal_those_of_eager():
    layout = PackedLayout.of([5, 70, 5, 5, 130], CPU)
    gradients = []
    for kind in ("tiled", "eager", "exact"):
        dtype = torch.float64 if kind == "exact" else torch.float32
        inputs = qkv(layout.num_tokens, heads=4, kv_heads=2, seed=3)
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        if kind == "tiled":
            out = TiledAttention.of(layout, num_kv_heads=2).attend(0, *leaves, scale=0.35)
        else:
            out = packed_attention(*leaves, layout, scale=0.35, kernel="eager")
        gradients.append(torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(0).cos()))
    for tiled, eager, exact in zip(*gradients, strict=True):
        assert_right_to_rounding(tiled, eager, exact=exact)


def test_large_scores_neither_overflow_nor_vanish():
    layout = PackedLayout.of([150], CPU)
    q, k, v = qkv(150, heads=2, kv_heads=2, seed=5)
    out = TiledAttention.of(layout, num_kv_heads=2).attend(0, 50 * q, 50 * k, v, scale=1.0)
    want = packed_attention(
        *(x.double() for x in (50 * q, 50 * k, v)), layout, scale=1.0, kernel="eager"
    )
    torch.testing.assert_close(out.double(), want.double(), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("limits", [Limits(5), Limits(70, 2.0), Limits(130)])
def test_a_limited_query_has_its_bits_alone_and_among_others(limits):
    layout, heads = PackedLayout.of([150, 40], CPU), {"heads": 4, "kv_heads": 2}
    q, k, v = qkv(layout.num_tokens, **heads, seed=9)
    whole = TiledAttention.of(layout, num_kv_heads=2).attend(0, q, k, v, scale=0.3, limits=limits)
    row_BT = torch.arange(150)[None] * 2
    for length in (1, 8, 64, 65, 70, 71, 128, 129, 150):
        ends = torch.tensor([length])
        for count in {1, min(length, 9)}:
            plan = TilePlan.of(torch.tensor([count]), ends, row_BT, num_kv_heads=2, head_stride=1)
            at, store = slice(length - count, length), (k.flatten(0, 1), v.flatten(0, 1))
            found = tiled_attention(q[at], *store, plan, scale=0.3, limits=limits)
            assert torch.equal(found, whole[at]), (length, count)


def test_a_plan_refuses_more_queries_than_tokens():
    counts, lengths, rows = torch.tensor([3]), torch.tensor([2]), torch.arange(4)[None]
    with pytest.raises(AssertionError, match="tensor"):
        TilePlan.of(counts, lengths, rows, num_kv_heads=1, head_stride=1)


def test_rows_of_the_store_beyond_a_document_are_never_read_into_it():
    q, k, v = qkv(10, heads=2, kv_heads=1, seed=7)
    store = torch.full((2, 100, 12), float("nan"))
    store[:, 40:50] = torch.stack([k[:, 0], v[:, 0]])
    lengths = torch.tensor([10])
    row_BT = torch.arange(40, 100)[None]
    plan = TilePlan.of(lengths, lengths, row_BT, num_kv_heads=1, head_stride=1)
    out = tiled_attention(q, *store, plan, scale=0.3)
    layout = PackedLayout.of([10], CPU)
    assert torch.equal(out, TiledAttention.of(layout, num_kv_heads=1).attend(0, q, k, v, scale=0.3))
