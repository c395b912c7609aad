"""Packed attention equals attention over each document alone, by every kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from homeostat.errors import ModelError
from homeostat.ops import capped_attention
from homeostat.ops.attention import (
    Limits,
    PackedLayout,
    packed_attention,
    planned_length,
    resolve_kernel,
)

CPU = torch.device("cpu")


def alone(q, k, v, scale, window=None, soft_cap=None):
    """One document in float64, written out."""
    q, k, v = (x.double() for x in (q, k, v))
    out = torch.zeros_like(q)
    for head in range(q.shape[1]):
        kv_head = head // (q.shape[1] // k.shape[1])
        scores = q[:, head] @ k[:, kv_head].t() * scale
        if soft_cap is not None:
            scores = (scores / soft_cap).tanh() * soft_cap
        scores += torch.full_like(scores, float("-inf")).triu(1)
        if window is not None:
            scores += torch.full_like(scores, float("-inf")).tril(-window)
        out[:, head] = scores.softmax(-1) @ v[:, kv_head]
    return out


def inputs(num_tokens, *, heads=4, kv_heads=2, dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(num_tokens, count, dim, generator=generator, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    ]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    groups=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    seed=st.integers(0, 10**6),
    window=st.sampled_from([None, 1, 3, 8]),
    soft_cap=st.sampled_from([None, 0.7]),
)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_documents_do_not_see_each_other(kernel, lengths, groups, seed, window, soft_cap):
    layout, limits = PackedLayout.of(lengths, CPU), Limits(window, soft_cap)
    q, k, v = inputs(layout.num_tokens, heads=groups[0], kv_heads=groups[1], seed=seed)
    out = packed_attention(q, k, v, layout, scale=0.3, kernel=kernel, limits=limits)
    split = [x.detach().split(lengths) for x in (q, k, v)]
    how = (0.3, window, soft_cap)
    want = torch.cat([alone(*parts, *how) for parts in zip(*split, strict=True)])
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("limits", [Limits(), Limits(3), Limits(3, 0.7)])
def test_gradients_of_the_kernels_agree(limits, monkeypatch):
    layout = PackedLayout.of([5, 2, 5, 5, 1], CPU)
    gradients = []
    # A small budget, so that capped scores are computed in parts and again.
    monkeypatch.setattr(capped_attention, "SCORE_BYTES", 256)
    for kernel in ("sdpa", "eager"):
        tensors = inputs(layout.num_tokens, seed=3)
        out = packed_attention(*tensors, layout, scale=0.35, kernel=kernel, limits=limits)
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        gradients.append([tensor.grad for tensor in tensors])
    for sdpa, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(sdpa, eager, atol=1e-5, rtol=1e-5)


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_sorting_by_length_makes_equal_lengths_neighbours_and_keeps_documents_whole(lengths):
    layout = PackedLayout.of(lengths, CPU)
    by_length, order = layout.by_length()
    assert list(by_length.lengths) == sorted(lengths)
    assert len(by_length.runs()) == len(set(lengths))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])
    moved = [values[order].split(by_length.lengths) for values in (document, position)]
    for documents, positions in zip(*moved, strict=True):
        assert len(set(documents.tolist())) == 1
        assert positions.tolist() == list(range(len(positions)))
    assert sorted(order.tolist()) == list(range(sum(lengths)))


def test_layout_knows_its_offsets():
    layout = PackedLayout.of([3, 1, 4], CPU)
    assert layout.offsets == (0, 3, 4)
    assert layout.max_length == 4
    assert layout.num_tokens == 8
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert layout.cu_seqlens.dtype == torch.int32


def test_auto_is_sdpa_on_a_cpu_and_varlen_there_is_refused():
    place = {"device_type": "cpu", "dtype": torch.float32, "head_dim": 64}
    assert resolve_kernel("auto", **place) == "sdpa"
    assert resolve_kernel("eager", **place) == "eager"
    with pytest.raises(ModelError, match=r"model\.attention.*CUDA"):
        resolve_kernel("varlen", **place)
    with pytest.raises(ModelError, match=r"model\.attention"):
        resolve_kernel("flash9", **place)


def test_varlen_in_fp32_is_refused_with_the_setting():
    with pytest.raises(ModelError, match=r"trainer\.precision"):
        resolve_kernel("varlen", device_type="cuda", dtype=torch.float32, head_dim=64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("fast", ["varlen", "rows"])
@pytest.mark.parametrize("lengths", [[17, 130, 3, 64], [128] * 3, [150] * 2, [1000]])
def test_fast_kernels_equal_eager_on_a_gpu(lengths, fast, kv_heads):
    device = torch.device("cuda")
    layout = PackedLayout.of(lengths, device)
    gradients = []
    for kernel in (fast, "eager"):
        tensors = inputs(layout.num_tokens, heads=4, kv_heads=kv_heads, dim=64, seed=1)
        tensors = [t.detach().to(device, torch.bfloat16).requires_grad_() for t in tensors]
        out = packed_attention(*tensors, layout, scale=0.125, kernel=kernel)
        out.float().pow(2).sum().backward()
        gradients.append([out, *(tensor.grad for tensor in tensors)])
    for found, eager in zip(*gradients, strict=True):
        # bf16 keeps 8 bits; sums over heads and tokens add their roundings.
        limit = 2e-2 * float(eager.detach().abs().max())
        torch.testing.assert_close(found, eager, atol=limit, rtol=0)


def test_planned_lengths_are_few_and_near():
    planned = [planned_length(length) for length in range(128, 32769)]
    assert all(0 <= more - length <= length // 8 for length, more in enumerate(planned, 128))
    assert len(set(planned)) <= 8 * 8 + 1
    assert planned_length(2048) == 2048
