"""Token log-probs equal a float64 log-softmax, however the problem is cut into tiles."""

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from homeostat.ops import logprobs
from homeostat.ops.logprobs import token_logprobs, token_logprobs_and_entropy


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


def require_right_to_rounding(found, wants, *, hidden, weight, temperature=1.0):
    """Each tensor is as near to the float64 result as fp32 logits allow.

    A logit of size z is known to about 1e-6 z, and so is what follows from it."""
    unit = 1e-6 * float((hidden.detach() @ weight.detach().t()).abs().max()) / temperature
    for got, want in zip(found, wants, strict=True):
        limit = 2e-6 + 5 * unit * float(want.abs().max().clamp_min(1))
        torch.testing.assert_close(got.detach().double(), want, atol=limit, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vocab", [97, 8192, 20_001])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_float64(seed, vocab, temperature):
    hidden, weight, targets, upstream = problem(13, vocab, 24, seed=seed)
    logp = token_logprobs(hidden, weight, targets, temperature=temperature, chunk_bytes=2**17)
    logp.backward(upstream)
    assert logp.dtype == torch.float32
    wants = reference(hidden, weight, targets, upstream, temperature)
    found = logp, hidden.grad, weight.grad
    require_right_to_rounding(found, wants, hidden=hidden, weight=weight, temperature=temperature)


def test_the_cut_into_tiles_does_not_change_the_result():
    for chunk_bytes in (2**16, 2**18, 2**30):
        hidden, weight, targets, upstream = problem(31, 9000, 16, seed=5)
        logp = token_logprobs(hidden, weight, targets, chunk_bytes=chunk_bytes)
        logp.backward(upstream)
        wants = reference(hidden, weight, targets, upstream)
        found = logp, hidden.grad, weight.grad
        require_right_to_rounding(found, wants, hidden=hidden, weight=weight)


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


def entropy_reference(hidden, weight, targets, upstreams, temperature=1.0):
    """(logp, entropy, gradient of hidden, gradient of weight) in float64."""
    hidden64 = hidden.detach().double().requires_grad_()
    weight64 = weight.detach().double().requires_grad_()
    log_p = torch.log_softmax(hidden64 @ weight64.t() / temperature, -1)
    logp = log_p.gather(1, targets[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    (logp @ upstreams[0].double() + entropy @ upstreams[1].double()).backward()
    return logp.detach(), entropy.detach(), hidden64.grad, weight64.grad


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("vocab", [5, 97, 20_001])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 8.0])
def test_entropy_and_its_gradient_equal_float64(seed, vocab, temperature, sharpness):
    hidden, weight, targets, upstream = problem(13, vocab, 24, seed=seed)
    hidden = (hidden.detach() * sharpness).requires_grad_()
    upstreams = upstream, torch.randn(13)
    logp, entropy = token_logprobs_and_entropy(
        hidden, weight, targets, temperature=temperature, chunk_bytes=2**17, entropy_grad=True
    )
    torch.autograd.backward((logp, entropy), upstreams)
    wants = entropy_reference(hidden, weight, targets, upstreams, temperature)
    assert entropy.dtype == torch.float32
    found = logp, entropy, hidden.grad, weight.grad
    require_right_to_rounding(found, wants, hidden=hidden, weight=weight, temperature=temperature)


@pytest.mark.parametrize("vocab", [97, 9000])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_the_entropy_leaves_every_bit_of_the_logprobs(vocab, entropy_grad):
    hidden, weight, targets, _ = problem(37, vocab, 16, seed=9)
    settings = {"temperature": 0.8, "chunk_bytes": 2**18}
    plain = token_logprobs(hidden, weight, targets, **settings)
    logp, _ = token_logprobs_and_entropy(
        hidden, weight, targets, entropy_grad=entropy_grad, **settings
    )
    assert torch.equal(logp, plain)


def test_an_entropy_without_gradient_leaves_the_backward_pass_as_it_was():
    gradients = []
    for with_entropy in (False, True):
        hidden, weight, targets, upstream = problem(21, 300, 16, seed=7)
        if with_entropy:
            logp, entropy = token_logprobs_and_entropy(
                hidden, weight, targets, chunk_bytes=2**16, entropy_grad=False
            )
            assert not entropy.requires_grad
        else:
            logp = token_logprobs(hidden, weight, targets, chunk_bytes=2**16)
        logp.backward(upstream)
        gradients.append((hidden.grad, weight.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])


def test_the_cut_into_tiles_does_not_change_the_entropy():
    for chunk_bytes in (2**16, 2**18, 2**30):
        hidden, weight, targets, upstream = problem(31, 9000, 16, seed=5)
        logp, entropy = token_logprobs_and_entropy(
            hidden, weight, targets, chunk_bytes=chunk_bytes, entropy_grad=True
        )
        (logp @ upstream + entropy.sum()).backward()
        wants = entropy_reference(hidden, weight, targets, (upstream, torch.ones(31)))
        found = logp, entropy, hidden.grad, weight.grad
        require_right_to_rounding(found, wants, hidden=hidden, weight=weight)


def test_the_entropy_of_bf16_inputs_is_summed_in_fp32():
    hidden, weight, targets, upstream = problem(7, 60, 16, seed=2, dtype=torch.bfloat16)
    upstreams = upstream, upstream.flip(0)
    logp, entropy = token_logprobs_and_entropy(
        hidden, weight, targets, chunk_bytes=2**16, entropy_grad=True
    )
    torch.autograd.backward((logp, entropy), upstreams)
    _, want, want_hidden, want_weight = entropy_reference(hidden, weight, targets, upstreams)
    torch.testing.assert_close(entropy.detach().double(), want, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), want_hidden, atol=1e-4, rtol=2**-8)
    torch.testing.assert_close(weight.grad.double(), want_weight, atol=1e-4, rtol=2**-8)


def test_a_certain_distribution_has_entropy_and_gradient_zero():
    """Most probabilities are 0 here, one logit even -inf: 0 * log 0 must be 0."""
    hidden = torch.eye(4, requires_grad=True)
    weight = torch.eye(4).mul_(3e4).requires_grad_()
    with torch.no_grad():
        weight[1, 0] = float("-inf")
        weight[1, 1:] = 0.0
    logp, entropy = token_logprobs_and_entropy(
        hidden[:1], weight, torch.tensor([0]), chunk_bytes=2**16, entropy_grad=True
    )
    (logp + entropy).backward()
    assert entropy.tolist() == logp.tolist() == [0.0]
    assert torch.equal(weight.grad, torch.zeros(4, 4))


def test_equal_logits_have_the_largest_entropy():
    vocab = 3 * logprobs.VOCAB_CHUNK + 5
    hidden, weight = torch.zeros(3, 8), torch.randn(vocab, 8)
    _, entropy = token_logprobs_and_entropy(
        hidden, weight, torch.zeros(3, dtype=torch.long), chunk_bytes=2**20, entropy_grad=False
    )
    torch.testing.assert_close(entropy, torch.full((3,), float(vocab)).log())
