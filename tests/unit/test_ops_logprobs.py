"""Token log-probs equal a float64 log-softmax, however the problem is cut into tiles."""

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from homeostat.ops import logprobs
from homeostat.ops.logprobs import token_logprobs


def problem(num_tokens, vocab, dim, *, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, dim, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
    upstream = torch.randn(num_tokens, generator=generator)
    return hidden, weight, targets, upstream


def reference(hidden, weight, targets, upstream, temperature=1.0):
    hidden64 = hidden.detach().double().requires_grad_()
    weight64 = weight.detach().double().requires_grad_()
    logits = hidden64 @ weight64.t() / temperature
    logp = torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)
    logp.backward(upstream.double())
    return logp.detach(), hidden64.grad, weight64.grad


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vocab", [97, 8192, 20_001])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_float64(seed, vocab, temperature):
    hidden, weight, targets, upstream = problem(13, vocab, 24, seed=seed)
    logp = token_logprobs(hidden, weight, targets, temperature=temperature, chunk_bytes=2**17)
    logp.backward(upstream)
    want, want_hidden, want_weight = reference(hidden, weight, targets, upstream, temperature)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.double(), want, atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), want_hidden, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(weight.grad.double(), want_weight, atol=2e-5, rtol=1e-5)


def test_the_cut_into_tiles_does_not_change_the_result():
    results = []
    for chunk_bytes in (2**16, 2**18, 2**30):
        hidden, weight, targets, upstream = problem(31, 9000, 16, seed=5)
        logp = token_logprobs(hidden, weight, targets, chunk_bytes=chunk_bytes)
        logp.backward(upstream)
        results.append((logp.detach(), hidden.grad, weight.grad))
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


def test_it_is_the_cross_entropy():
    hidden, weight, targets, _ = problem(50, 300, 32, seed=8)
    logp = token_logprobs(hidden, weight, targets, chunk_bytes=2**16)
    loss = functional.cross_entropy(hidden @ weight.t(), targets)
    torch.testing.assert_close(-logp.mean(), loss, atol=1e-5, rtol=1e-6)


def test_bf16_inputs_are_summed_in_fp32():
    hidden, weight, targets, upstream = problem(7, 60, 16, seed=2, dtype=torch.bfloat16)
    logp = token_logprobs(hidden, weight, targets, chunk_bytes=2**16)
    logp.backward(upstream)
    want, want_hidden, want_weight = reference(hidden, weight, targets, upstream)
    torch.testing.assert_close(logp.double(), want, atol=1e-5, rtol=1e-6)
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    # Rounded once: within half a unit in the last place of bf16, which has 8 bits.
    torch.testing.assert_close(hidden.grad.double(), want_hidden, atol=1e-5, rtol=2**-8)
    torch.testing.assert_close(weight.grad.double(), want_weight, atol=1e-5, rtol=2**-8)


def test_no_tokens_give_no_logprobs_and_zero_gradients():
    hidden, weight, targets, _ = problem(0, 40, 8, seed=1)
    logp = token_logprobs(hidden, weight, targets, chunk_bytes=2**16)
    logp.sum().backward()
    assert logp.shape == (0,)
    assert hidden.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, targets, upstream = problem(9, 70, 8, seed=3)
    _, want_hidden, _ = reference(hidden, weight, targets, upstream)
    weight.requires_grad_(False)
    token_logprobs(hidden, weight, targets, chunk_bytes=2**16).backward(upstream)
    assert weight.grad is None
    torch.testing.assert_close(hidden.grad.double(), want_hidden, atol=2e-5, rtol=1e-5)


def test_extreme_logits_stay_finite():
    hidden, weight, targets, upstream = problem(6, 50, 8, seed=4)
    hidden = (hidden.detach() * 300).requires_grad_()
    logp = token_logprobs(hidden, weight, targets, chunk_bytes=2**16)
    logp.backward(upstream)
    want, _, _ = reference(hidden, weight, targets, upstream)
    torch.testing.assert_close(logp.double(), want, atol=1e-2, rtol=1e-6)
    assert hidden.grad.isfinite().all()


def test_no_allocation_is_as_large_as_the_logits():
    vocab, num_tokens, dim, chunk_bytes = 3 * logprobs.VOCAB_CHUNK, 256, 4, 2**20
    hidden, weight, targets, upstream = problem(num_tokens, vocab, dim, seed=6)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        token_logprobs(hidden, weight, targets, chunk_bytes=chunk_bytes).backward(upstream)
    sizes = [event.cpu_memory_usage for event in trace.events() if event.name.startswith("aten::")]
    assert 0.9 * chunk_bytes < max(sizes) <= chunk_bytes < num_tokens * vocab * 4 / 20


def test_a_second_derivative_is_refused():
    """The backward pass takes the normaliser as given, so that one would be wrong."""
    hidden, weight, targets, upstream = problem(4, 30, 8, seed=2)
    upstream.requires_grad_()
    logp = token_logprobs(hidden, weight, targets, chunk_bytes=2**16)
    (grad,) = torch.autograd.grad(logp @ upstream, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
