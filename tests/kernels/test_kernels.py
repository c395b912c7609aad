"""Kernels against float64, and against the plain path: results, and every gradient.

They run on a GPU, or on the CPU in Triton's interpreter, which has to be chosen before Triton is
imported: tests/unit/test_ops_kernels.py starts a process for that.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.parity.tiny_models import FAMILIES, SIZES
from torch import Tensor

from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.shape_only import ShapeDecoder
from homeostat.ops import kernels
from homeostat.ops.activations import gated_silu
from homeostat.ops.attention import PackedLayout
from homeostat.ops.live_bytes import LiveBytes
from homeostat.ops.logprobs import token_logprobs, token_logprobs_and_entropy
from homeostat.ops.norms import add_rms_norm, rms_norm
from homeostat.ops.rope import RopeConfig, apply_rope_to_both, inverse_frequencies, rope_tables

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device or Triton's interpreter (tests/unit/test_ops_kernels.py)",
)

Results = list[Tensor]


def drawn(*sizes: int, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*sizes, generator=generator).to(DEVICE)


def results(run: Callable[..., Tensor | Sequence[Tensor]], *inputs: Tensor) -> Results:
    """What comes out, and the gradients of a random weighting of it by the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    outputs = [out] if isinstance(out, Tensor) else list(out)
    upstream = [drawn(*x.shape, seed=9 + at).to(x.dtype) for at, x in enumerate(outputs)]
    weighed = [(x, up) for x, up in zip(outputs, upstream, strict=True) if x.requires_grad]
    torch.autograd.backward(*zip(*weighed, strict=True))
    return [*(x.detach() for x in outputs), *(x.grad for x in leaves)]


def assert_near(found: Results, wanted: Results, *, rtol: float = 3e-6) -> None:
    """To `rtol` of the largest entry: sums of many terms cancel."""
    for x, y in zip(found, wanted, strict=True):
        scale = max(1e-30, float(y.abs().max()))
        torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=rtol * scale)


def in_float64(run: Callable[..., Tensor | Sequence[Tensor]], *inputs: Tensor) -> Results:
    return results(run, *(x.double() for x in inputs))


def reference_norm(x: Tensor, weight_D: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight_D


def reference_add_norm(x: Tensor, y: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    return x + y, reference_norm(x + y, weight_D)


def reference_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    def turn(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right * sin, left * sin), dim=-1)

    return turn(q), turn(k)


@pytest.mark.parametrize("shape", [(1, 576), (3, 896), (2, 1536), (67, 24), (3, 5, 64)])
def test_norms_equal_float64(shape: tuple[int, ...]) -> None:
    x, y, weight_D = drawn(*shape, seed=0), drawn(*shape, seed=1), drawn(shape[-1], seed=2)
    found = results(lambda x, w: rms_norm(x, w, eps=1e-5), x, weight_D)
    assert_near(found, in_float64(reference_norm, x, weight_D))
    found = results(lambda x, y, w: add_rms_norm(x, y, w, eps=1e-5), x, y, weight_D)
    assert_near(found, in_float64(reference_add_norm, x, y, weight_D))


def test_a_weight_of_a_norm_that_is_frozen_gets_no_gradient() -> None:
    x, weight_D = drawn(4, 24, seed=0).requires_grad_(), drawn(24, seed=1)
    rms_norm(x, weight_D, eps=1e-5).sum().backward()
    assert x.grad is not None
    assert weight_D.grad is None


@pytest.mark.parametrize("sizes", [(1, 14, 2, 64), (3, 12, 2, 128), (5, 3, 1, 24), (2, 9, 3, 16)])
def test_rotations_equal_float64(sizes: tuple[int, int, int, int]) -> None:
    num_tokens, num_q, num_k, head_dim = sizes
    rope = RopeConfig(theta=1e4, attention_factor=1.2)
    positions_N = torch.arange(num_tokens, device=DEVICE) * 37
    inv_freq_F = inverse_frequencies(rope, head_dim=head_dim).to(DEVICE)
    cos, sin = rope_tables(positions_N, inv_freq_F, rope)
    q = drawn(num_tokens, num_q, head_dim, seed=0)
    k = drawn(num_tokens, num_k, head_dim, seed=1)
    found = results(lambda q, k: apply_rope_to_both(q, k, cos, sin), q, k)
    wide = cos.double(), sin.double()
    assert_near(found, in_float64(lambda q, k: reference_rotation(q, k, *wide), q, k))


def test_queries_and_keys_may_be_slices_of_one_product() -> None:
    joint = drawn(4, 6, 16, seed=0)
    cos, sin = drawn(4, 1, 8, seed=1).repeat(1, 1, 2), drawn(4, 1, 8, seed=2)
    found = apply_rope_to_both(joint[:, :4], joint[:, 4:], cos, sin)
    wanted = reference_rotation(joint[:, :4], joint[:, 4:], cos, sin)
    assert_near(list(found), list(wanted))


@pytest.mark.parametrize("shape", [(1, 5), (3, 4864), (7, 96)])
def test_gated_silu_equals_float64(shape: tuple[int, int]) -> None:
    gate, up = 4 * drawn(*shape, seed=0), drawn(*shape, seed=1)
    found = results(gated_silu, gate, up)
    reference = in_float64(lambda gate, up: gate / (1 + (-gate).exp()) * up, gate, up)
    assert_near(found, reference)


# One chunk of the vocabulary, and three of which the last is short.
@pytest.mark.parametrize(
    ("num_words", "with_entropy"),
    [
        (97, False),
        (97, True),
        (2 * 8192 + 77, True),
        pytest.param(2 * 8192 + 77, False, marks=pytest.mark.slow),
    ],
)
def test_logprobs_and_entropy_equal_float64(num_words: int, with_entropy: bool) -> None:
    hidden, weight = drawn(11, 24, seed=0), drawn(num_words, 24, seed=1)
    targets_M = torch.arange(11, device=DEVICE) * (num_words // 11)
    targets_M[0], targets_M[1] = num_words - 1, min(8191, num_words - 2)
    how = {"temperature": 0.7, "chunk_bytes": 2**18}

    def run(hidden: Tensor, weight: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if not with_entropy:
            return token_logprobs(hidden, weight, targets_M, **how)
        return token_logprobs_and_entropy(hidden, weight, targets_M, **how, entropy_grad=True)

    def reference(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        log_p = (hidden @ weight.t() / 0.7).log_softmax(-1)
        logp_M = log_p.gather(1, targets_M[:, None]).squeeze(1)
        entropy_M = -(log_p.exp() * log_p).sum(-1)
        return (logp_M, entropy_M) if with_entropy else (logp_M,)

    assert_near(results(run, hidden, weight), in_float64(reference, hidden, weight), rtol=1e-5)


def test_an_entropy_that_is_only_measured_leaves_the_gradient_alone() -> None:
    hidden, weight = drawn(5, 16, seed=0), drawn(300, 16, seed=1)
    targets_M = torch.arange(5, device=DEVICE)

    def measured(hidden: Tensor, weight: Tensor) -> Tensor:
        logp_M, entropy_M = token_logprobs_and_entropy(
            hidden, weight, targets_M, chunk_bytes=2**16, entropy_grad=False
        )
        assert not entropy_M.requires_grad
        return logp_M

    def alone(hidden: Tensor, weight: Tensor) -> Tensor:
        return token_logprobs(hidden, weight, targets_M, chunk_bytes=2**16)

    for x, y in zip(results(measured, hidden, weight), results(alone, hidden, weight), strict=True):
        assert torch.equal(x, y)


def test_a_nan_reaches_the_logprob_of_its_token_alone() -> None:
    hidden, weight = drawn(4, 16, seed=0), drawn(300, 16, seed=1)
    hidden[2, 3] = float("nan")
    targets_M = torch.arange(4, device=DEVICE)
    how = {"chunk_bytes": 2**16, "entropy_grad": False}
    for values_M in token_logprobs_and_entropy(hidden, weight, targets_M, **how):
        assert values_M.isnan().tolist() == [False, False, True, False]


def test_certain_and_impossible_words_are_no_trouble() -> None:
    """A softmax that underflows everywhere but at one word: entropy 0, and no NaN."""
    hidden, weight = torch.eye(2, device=DEVICE) * 4000, torch.eye(2, device=DEVICE)
    targets_M = torch.tensor([0, 0], device=DEVICE)
    found = results(
        lambda h, w: token_logprobs_and_entropy(
            h, w, targets_M, chunk_bytes=2**16, entropy_grad=True
        ),
        hidden,
        weight,
    )
    assert found[0].tolist() == [0.0, -4000.0]
    assert found[1].tolist() == [0.0, 0.0]
    assert all(bool(x.isfinite().all()) for x in found)


def test_bf16_is_computed_in_fp32_and_rounded_once() -> None:
    x, y, weight_D = (drawn(*size, seed=at) for at, size in enumerate(((5, 48), (5, 48), (48,))))
    x, y, weight_D = x.bfloat16(), y.bfloat16(), weight_D.bfloat16()
    total, normed = add_rms_norm(x, y, weight_D, eps=1e-5)
    pairs = [
        (total, x.double() + y.double()),
        (normed, reference_norm(total.double(), weight_D.double())),
        (gated_silu(x, y), torch.nn.functional.silu(x.double()) * y.double()),
    ]
    # A GPU rounds to nearest; the interpreter cuts off, which is off by up to twice as much.
    one_rounding = 2**-8 if DEVICE.type == "cuda" else 2**-7
    for found, exact in pairs:
        assert bool(((found.double() - exact).abs() <= 1.001 * one_rounding * exact.abs()).all())


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    x, y, weight_D = drawn(9, 96, seed=0), drawn(9, 96, seed=1), drawn(96, seed=2)
    cos, sin = drawn(9, 1, 12, seed=3).repeat(1, 1, 2), drawn(9, 1, 12, seed=4)

    def run(rows: slice) -> list[Tensor]:
        heads = x[rows].unflatten(1, (4, 24))
        turned = apply_rope_to_both(heads, heads[:, :2], cos[rows], sin[rows])
        normed = add_rms_norm(x[rows], y[rows], weight_D, eps=1e-5)
        return [*turned, *normed, gated_silu(x[rows], y[rows])]

    for whole, alone in zip(run(slice(0, 9)), run(slice(4, 5)), strict=True):
        assert torch.equal(whole[4:5], alone)


def test_nothing_in_nothing_out() -> None:
    x, weight_D = drawn(0, 24, seed=0), drawn(24, seed=1)
    found = results(lambda x, w: add_rms_norm(x, x, w, eps=1e-5), x, weight_D)
    assert [tuple(part.shape) for part in found] == [(0, 24), (0, 24), (0, 24), (24,)]
    assert not found[-1].any()
    no_targets_M = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    found = results(
        lambda h, w: token_logprobs(h, w, no_targets_M, chunk_bytes=2**16), x, drawn(30, 24, seed=1)
    )
    assert found[0].shape == (0,)
    assert not found[2].any()


def test_plain_is_without_kernels() -> None:
    x = drawn(2, 4, seed=0)
    assert kernels.fused(x)
    assert not kernels.fused(x.double())
    with kernels.plain():
        assert not kernels.fused(x)
    assert kernels.fused(x)


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        ("qwen3", False),
        ("qwen2", "selective"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("qwen2", False), ("qwen3", "selective"), ("qwen2", True), ("qwen3", True))
        ),
    ],
)
def test_a_decoder_learns_the_same_with_kernels_and_without(
    family: str, checkpointing: bool | str
) -> None:
    shape = decoder_config({**SIZES, **FAMILIES[family]})
    decoder = Decoder(shape, kernel="sdpa", gradient_checkpointing=checkpointing).to(DEVICE)
    tokens_N = torch.randint(0, decoder.config.vocab_size, (13,), device=DEVICE)
    positions_N = torch.cat([torch.arange(8), torch.arange(5)]).to(DEVICE)
    layout = PackedLayout.of([8, 5], DEVICE)

    def gradients() -> dict[str, Tensor]:
        decoder.zero_grad()
        hidden_ND = decoder.hidden(tokens_N, positions_N, layout)
        weight_VD = decoder.output_weight()
        logp_N = token_logprobs(hidden_ND, weight_VD, tokens_N.roll(-1), chunk_bytes=2**16)
        logp_N.mean().backward()
        return {name: p.grad.clone() for name, p in decoder.named_parameters()}

    found = gradients()
    with kernels.plain():
        wanted = gradients()
    assert_near(list(found.values()), list(wanted.values()), rtol=2e-5)


def test_selective_checkpointing_spares_norms_and_gates() -> None:
    sizes = {**SIZES, **FAMILIES["qwen2"]}
    decoder = Decoder(decoder_config(sizes), kernel="sdpa").to(DEVICE)
    tokens_N = torch.arange(24, device=DEVICE)
    layout = PackedLayout.of([24], DEVICE)

    def kept(checkpointing: bool | str) -> int:
        decoder.gradient_checkpointing = checkpointing
        with LiveBytes(DEVICE.type) as live:
            hidden_ND = decoder.hidden(tokens_N, tokens_N, layout)
            # Triton's interpreter leaves the arguments of a launch in a reference cycle.
            gc.collect()
            return live.now * hidden_ND.requires_grad

    spared = 2 * (2 * sizes["hidden_size"] + sizes["intermediate_size"]) * 24 * 4
    assert kept(False) - kept("selective") >= spared


@pytest.mark.parametrize(
    "checkpointing",
    [False, *(pytest.param(how, marks=pytest.mark.slow) for how in ("selective", True))],
)
def test_a_decoder_without_data_keeps_what_kernels_keep(checkpointing: bool | str) -> None:
    shape = decoder_config({**SIZES, **FAMILIES["qwen2"], "num_key_value_heads": 4})
    flags = {"kernel": "sdpa", "gradient_checkpointing": checkpointing}

    def kept(decoder: Decoder, device: torch.device) -> int:
        tokens_N = torch.zeros(48, dtype=torch.int64, device=device)
        layout = PackedLayout.of([48], device)
        with LiveBytes(device.type) as live:
            hidden_ND = decoder.hidden(tokens_N, tokens_N, layout)
            # Triton's interpreter leaves the arguments of a launch in a reference cycle.
            gc.collect()
            return live.now * hidden_ND.requires_grad

    nowhere = torch.device("meta")
    with nowhere:
        shape_decoder = ShapeDecoder(shape, **flags)
    with kernels.meta_as(torch.device("cuda")):
        counted = kept(shape_decoder, nowhere)
    assert counted == pytest.approx(kept(Decoder(shape, **flags).to(DEVICE), DEVICE), rel=0.03)
    assert kept(shape_decoder, nowhere) != counted
