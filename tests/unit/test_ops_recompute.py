"""What is made again in the backward pass has the same bits, and is not kept in between."""

from __future__ import annotations

import pytest
import torch
from tests.parity.tiny_models import FAMILIES, SIZES
from torch import Tensor

from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.ops.attention import PackedLayout
from homeostat.ops.live_bytes import LiveBytes
from homeostat.ops.recompute import forgotten


def test_a_value_is_made_again_once_for_all_its_users() -> None:
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    calls = []

    def double() -> Tensor:
        calls.append(1)
        return x * 2

    value = x * 2
    with forgotten(value, double, enabled=True):
        out = value @ weight + (value @ weight) * value
    out.sum().backward()
    found, x.grad = x.grad, None
    assert len(calls) == 1
    value = x * 2
    (value @ weight + (value @ weight) * value).sum().backward()
    assert torch.equal(found, x.grad)


def gradients_and_bytes(decoder: Decoder, checkpointing: bool | str) -> tuple[list[Tensor], int]:
    decoder.gradient_checkpointing = checkpointing
    generator = torch.Generator().manual_seed(0)
    tokens_N = torch.randint(0, decoder.config.vocab_size, (96,), generator=generator)
    positions_N = torch.cat([torch.arange(64), torch.arange(32)])
    layout = PackedLayout.of([64, 32], torch.device("cpu"))
    decoder.zero_grad()
    with LiveBytes("cpu") as live:
        hidden_ND = decoder.hidden(tokens_N, positions_N, layout)
        kept = live.now
    hidden_ND.square().sum().backward()
    grads = [p.grad.clone() for p in decoder.parameters() if p.grad is not None]
    return grads, kept


@pytest.mark.parametrize("family", ["llama_bias", "qwen3"])
def test_a_decoder_keeps_less_and_learns_the_same_bits(family: str) -> None:
    decoder = Decoder(decoder_config({**SIZES, **FAMILIES[family]}), kernel="sdpa")
    wanted, most = gradients_and_bytes(decoder, False)
    found, some = gradients_and_bytes(decoder, "selective")
    _, least = gradients_and_bytes(decoder, True)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    # Without kernels a norm keeps what it would be made of, so that the gates alone are spared.
    assert most - some >= 2 * 96 * SIZES["intermediate_size"] * 4
    assert least < some
