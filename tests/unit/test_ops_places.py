"""Invariant numerics: an element's bits do not depend on its place.

Loops over tensors have a body of whole vectors and a tail, which other code may compute; threads
cut a large tensor anywhere. So every operation is tried at places and lengths that leave tails, in
views that begin anywhere in memory, by one thread and by several. Where the arithmetic is exact by
definition, the reference is numpy's, one operation at a time: that holds on every processor.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from homeostat.ops.activations import gated, gated_silu
from homeostat.ops.linear import linear
from homeostat.ops.logit_tiles import VOCAB_CHUNK
from homeostat.ops.logprobs import token_logprobs, token_logprobs_and_entropy
from homeostat.ops.norms import add_rms_norm, rms_norm, unit_rms
from homeostat.ops.rope import (
    RopeConfig,
    apply_rope,
    apply_rope_to_both,
    inverse_frequencies,
    rope_tables,
)

# Above 32,768 elements torch divides a loop among threads.
LENGTHS = (1, 3, 7, 13, 17, 31, 33, 100, 1001, 70_003)
OFFSETS = (0, 1, 2, 3, 5, 8, 17)
# What invariant numerics use beyond the operations that IEEE 754 defines: see ops/activations.py.
WITHOUT_TAIL = {
    "exp": (torch.exp, lambda n: 3 * torch.randn(n)),
    "log": (torch.log, lambda n: torch.rand(n) * 5 + 1e-3),
    "sin": (torch.sin, lambda n: torch.rand(n) * 5000),
    "cos": (torch.cos, lambda n: torch.rand(n) * 5000),
    "exp_": (lambda x: x.clone().exp_(), lambda n: 3 * torch.randn(n)),
}


@pytest.fixture(params=[1, 3])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", WITHOUT_TAIL)
def test_a_function_gives_an_element_the_same_bits_at_every_place(num_threads, name):
    function, draw = WITHOUT_TAIL[name]
    for length in LENGTHS:
        x = draw(length + max(OFFSETS))
        whole = function(x)
        for offset in OFFSETS:
            found = function(x[offset : offset + length])
            assert torch.equal(found, whole[offset : offset + length]), (length, offset)


def test_a_function_gives_the_elements_of_a_strided_view_the_bits_of_a_copy(num_threads):
    x = 3 * torch.randn(700, 2, 53)
    for name, (function, _) in WITHOUT_TAIL.items():
        view = x[:, 0, 1:48] if name != "log" else x[:, 0, 1:48].abs()
        assert torch.equal(function(view), function(view.contiguous())), name


# (tokens, heads, head dim): odd halves, single tokens, and enough to be divided among threads.
SHAPES = [(1, 1, 2), (1, 3, 12), (7, 5, 12), (3, 1, 64), (999, 3, 12), (999, 3, 64), (50, 2, 34)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_rotation_is_products_and_sums_rounded_one_by_one(num_threads, shape, sign):
    num_tokens, _, head_dim = shape
    rope = RopeConfig(theta=10_000.0)
    inv_freq = inverse_frequencies(rope, head_dim=head_dim)
    cos, sin = rope_tables(torch.randint(0, 5000, (num_tokens,)), inv_freq, rope)
    x = torch.randn(shape, requires_grad=sign < 0)
    out = apply_rope(x, cos, sin)
    found = out if sign > 0 else torch.autograd.grad(out, x, x.detach())[0]
    left, right = np.split(x.detach().numpy(), 2, axis=-1)
    c, s = cos.numpy()[..., : head_dim // 2], sign * sin.numpy()
    want = np.concatenate([left * c - right * s, right * c + left * s], axis=-1)
    assert np.array_equal(found.detach().numpy(), want)


@pytest.mark.parametrize("num_frequencies", [6, 32])
def test_a_tokens_angles_do_not_depend_on_its_neighbours(num_threads, num_frequencies):
    """Small and large angles side by side: a vector routine may treat them by another path."""
    rope = RopeConfig(theta=10_000.0)
    inv_freq = inverse_frequencies(rope, head_dim=2 * num_frequencies)
    positions = torch.randint(0, 100_000, (3000,))
    whole = rope_tables(positions, inv_freq, rope)
    for size in (1, 2, 31, 33, 998, 2999):
        rows = torch.randperm(3000)[:size]
        for part, table in zip(rope_tables(positions[rows], inv_freq, rope), whole, strict=True):
            assert torch.equal(part, table[rows]), size
    angles = (positions[:, None].float() * inv_freq).double()
    np.testing.assert_allclose(whole[1][:, 0].double(), angles.sin(), atol=1e-7, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_queries_and_keys_are_rotated_alike_with_and_without_a_gradient(num_threads, shape):
    num_tokens, num_heads, head_dim = shape
    rope = RopeConfig(theta=10_000.0)
    inv_freq = inverse_frequencies(rope, head_dim=head_dim)
    tables = rope_tables(torch.randint(0, 5000, (num_tokens,)), inv_freq, rope)
    q, k = torch.randn(num_tokens, num_heads, head_dim), torch.randn(num_tokens, 1, head_dim)
    trained = apply_rope_to_both(q, k, *tables)
    with torch.no_grad():
        served = apply_rope_to_both(q, k, *tables)
    assert all(torch.equal(one, other) for one, other in zip(trained, served, strict=True))


@pytest.mark.parametrize(("rows", "width"), [(1, 7), (3, 24), (999, 97), (2000, 36)])
def test_a_norm_is_its_row_sum_and_operations_rounded_one_by_one(num_threads, rows, width):
    x, weight = torch.randn(rows, width), torch.randn(width)
    length = torch.stack([torch.linalg.vector_norm(row) for row in x]).numpy()
    mean = length * length * np.float32(1.0 / width)
    rstd = np.float32(1) / np.sqrt(mean + np.float32(1e-5))
    want = x.numpy() * rstd[:, None]
    assert np.array_equal(unit_rms(x, eps=1e-5).numpy(), want)
    for y in (x, x.clone().requires_grad_()):
        found = rms_norm(y, weight, eps=1e-5)
        assert np.array_equal(found.detach().numpy(), want * weight.numpy())
    total, normed = add_rms_norm(x, x, weight, eps=1e-5)
    assert torch.equal(normed, rms_norm(total, weight, eps=1e-5))


def at(offset: int, tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins so many elements into its allocation, for an alignment of its own."""
    room = torch.empty(offset + tensor.numel(), dtype=tensor.dtype)
    room[offset:] = tensor.flatten()
    return room[offset:].view(tensor.shape)


@given(
    start=st.integers(0, 80),
    rows=st.integers(1, 70),
    offset=st.sampled_from([0, 1, 3, 4, 9]),
    width=st.sampled_from([5, 24, 97]),
)
def test_rows_have_their_bits_wherever_they_begin_in_memory(start, rows, offset, width):
    generator = torch.Generator().manual_seed(width)
    x, y = (torch.randn(150, width, generator=generator) for _ in range(2))
    weight, some = torch.randn(width, generator=generator), slice(start, start + rows)
    matrix = torch.randn(11, width, generator=generator)
    for function in (
        lambda x, y: gated_silu(x, y, numerics="invariant"),
        lambda x, y: gated(x, y, activation="gelu_tanh", numerics="invariant"),
        lambda x, y: rms_norm(x, weight, eps=1e-5),
        lambda x, y: add_rms_norm(x, y, weight, eps=1e-5)[1],
        lambda x, y: linear(x, matrix, numerics="invariant"),
    ):
        found = function(at(offset, x[some]), at(offset, y[some]))
        assert torch.equal(found, function(x, y)[some])


# One entry in the last chunk of the vocabulary, some, and several chunks.
@pytest.mark.parametrize("vocabulary", [97, VOCAB_CHUNK + 1, VOCAB_CHUNK + 9, 17 * VOCAB_CHUNK])
def test_a_log_prob_has_its_bits_whatever_tokens_come_with_it(num_threads, vocabulary):
    hidden, weight = torch.randn(70, 5), torch.randn(vocabulary, 5)
    targets = torch.randint(0, vocabulary, (70,))
    targets[::3] = vocabulary - 1
    how = {"temperature": 0.9, "chunk_bytes": 2**20, "numerics": "invariant"}
    whole = token_logprobs(hidden, weight, targets, **how)
    _, entropy = token_logprobs_and_entropy(hidden, weight, targets, entropy_grad=False, **how)
    for size in (1, 2, 31, 33, 69):
        rows = torch.randperm(70)[:size]
        logp, part = token_logprobs_and_entropy(
            hidden[rows], weight, targets[rows], entropy_grad=False, **how
        )
        assert torch.equal(logp, whole[rows]), size
        assert torch.equal(part, entropy[rows]), size


@pytest.mark.slow
@pytest.mark.skipif("ATEN_CPU_CAPABILITY" in os.environ, reason="one level is enough")
@pytest.mark.parametrize("instructions", ["default", "avx2"])
def test_all_of_this_holds_with_fewer_instructions(instructions):
    """What torch would do on a lesser processor of this architecture."""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": instructions}
    files = [__file__, __file__.replace("test_ops_places", "test_ops_invariant")]
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
