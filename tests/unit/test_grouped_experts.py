"""Experts by grouped products against the plain path, on a CPU (tests/kernels has the kernels)."""

from __future__ import annotations

import pytest
import torch
from tests.parity.tiny_models import SIZES
from torch import Tensor

from homeostat.config.model import ModelConfig
from homeostat.errors import ModelError
from homeostat.models.build import decoder_flags
from homeostat.models.decoder import Decoder
from homeostat.models.families import DecoderConfig, decoder_config
from homeostat.ops.attention import PackedLayout
from homeostat.ops.experts import experts_of
from homeostat.ops.linear import Numerics

MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
BF16 = torch.bfloat16


def shape() -> DecoderConfig:
    return decoder_config({**SIZES, **MOE})


def drawn(*sizes: int, seed: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def results(
    kernel: str, numerics: Numerics, dtype: torch.dtype, *, width: int, num_tokens: int
) -> list[Tensor]:
    """The weighted sums, and the gradients of rows, weights and both stacks of matrices."""
    leaves = [
        drawn(num_tokens, width, seed=0),
        0.2 * drawn(6, 48, width, seed=1),
        0.2 * drawn(6, width, 24, seed=2),
    ]
    x, gate_up, down = (leaf.to(BF16).to(dtype).requires_grad_() for leaf in leaves)
    # Nobody chooses the fourth expert.
    scores = drawn(num_tokens, 6, seed=3).index_fill(1, torch.tensor(3), -9.0)
    weights = drawn(num_tokens, 2, seed=4).abs().requires_grad_()
    ids = scores.topk(2).indices
    out = experts_of(x, ids, weights, gate_up, down, numerics=numerics, kernel=kernel)
    upstream = drawn(num_tokens, width, seed=5).to(BF16).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, (x, weights, gate_up, down), upstream)]


# A width of 20 is no multiple of 16 bytes in bf16: torch's grouped product does not take it.
@pytest.mark.parametrize(
    ("numerics", "dtype", "width", "limit"),
    [
        ("fast", torch.float32, 32, 1e-6),
        ("fast", BF16, 32, 0.01),
        ("fast", BF16, 20, 0.01),
        ("invariant", torch.float32, 20, 1e-6),
    ],
)
def test_results_and_gradients_are_those_of_the_plain_path(
    numerics: Numerics, dtype: torch.dtype, width: int, limit: float
) -> None:
    size = {"width": width, "num_tokens": 19}
    wanted = results("plain", "fast", torch.float32, **size)
    found = results("grouped", numerics, dtype, **size)
    for ours, plain in zip(found, wanted, strict=True):
        assert float((ours - plain).norm() / plain.norm()) <= limit
    assert not found[3][3].any(), "an expert without tokens has no gradient"


def test_with_one_token() -> None:
    size = {"width": 32, "num_tokens": 1}
    for ours, plain in zip(
        results("grouped", "fast", torch.float32, **size),
        results("plain", "fast", torch.float32, **size),
        strict=True,
    ):
        torch.testing.assert_close(ours, plain)


def test_invariant_numerics_have_the_bits_of_the_plain_path() -> None:
    size = {"width": 32, "num_tokens": 19}
    grouped, plain = (
        results(kernel, "invariant", torch.float32, **size)[0] for kernel in ("grouped", "plain")
    )
    assert torch.equal(grouped, plain)


def learned(decoder: Decoder) -> list[Tensor]:
    decoder.zero_grad()
    tokens_N = torch.arange(13) * 7 % decoder.config.vocab_size
    positions_N = torch.cat([torch.arange(8), torch.arange(5)])
    hidden_ND = decoder.hidden(tokens_N, positions_N, PackedLayout.of([8, 5], torch.device("cpu")))
    hidden_ND.square().sum().backward()
    return [hidden_ND.detach(), *(p.grad for p in decoder.model.parameters())]


@pytest.mark.parametrize("checkpointing", ["selective", True])
def test_gradients_have_the_same_bits_with_checkpointing(checkpointing: bool | str) -> None:
    torch.manual_seed(0)
    decoder = Decoder(shape(), kernel="sdpa", grouped_kernel="grouped")
    wanted = learned(decoder)
    decoder.gradient_checkpointing = checkpointing
    for ours, other in zip(learned(decoder), wanted, strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("kernel", ["plain", "grouped"])
def test_shapes_alone_can_be_computed(kernel: str) -> None:
    """The memory plan runs the decoder on the meta device."""
    with torch.device("meta"):
        decoder = Decoder(shape(), kernel="eager", grouped_kernel=kernel)
    x_ND = torch.empty(9, SIZES["hidden_size"], device="meta", requires_grad=True)
    block = decoder.moe_blocks[0]
    ids_NK = torch.empty(9, 2, dtype=torch.int64, device="meta")
    out_ND = block.experts(x_ND, ids_NK, torch.empty(9, 2, device="meta"))
    out_ND.sum().backward()
    assert x_ND.grad is not None
    assert out_ND.shape == x_ND.shape


def flags(device: str, **settings: object) -> dict[str, object]:
    config = ModelConfig.model_validate({"path": "here", **settings})
    return decoder_flags(config, shape(), False, dtype=BF16, device=torch.device(device))


def test_the_key_reaches_the_experts() -> None:
    assert flags("cpu")["grouped_kernel"] == "auto"
    chosen = flags("cpu", moe={"grouped_kernel": "grouped"})
    decoder = Decoder(shape(), **chosen)
    assert [block.experts.kernel for block in decoder.moe_blocks] == ["grouped"] * 2


def test_plain_experts_in_invariant_numerics_are_refused_on_a_gpu() -> None:
    settings = {"moe": {"grouped_kernel": "plain"}, "numerics": "invariant", "attention": "sdpa"}
    flags("cpu", **settings)
    with pytest.raises(ModelError, match=r"Set model\.moe\.grouped_kernel=auto"):
        flags("cuda", **settings)
