"""Weights that lie one behind the other in memory, and are still each their own."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.parity.tiny_models import FAMILIES, SIZES

from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.side_by_side import joined, lay_side_by_side
from homeostat.ops.attention import PackedLayout


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(decoder_config({**SIZES, **FAMILIES["qwen2"]}), kernel="sdpa")


def test_names_values_and_results_stay(tmp_path: Path) -> None:
    apart, beside = decoder(), decoder()
    lay_side_by_side(beside)
    wanted = apart.state_dict()
    assert list(beside.state_dict()) == list(wanted)
    save_file(beside.state_dict(), tmp_path / "weights.safetensors")
    stored = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in wanted.items())
    tokens_N, layout = torch.arange(7), PackedLayout.of([7], torch.device("cpu"))
    torch.testing.assert_close(
        beside.hidden(tokens_N, tokens_N, layout), apart.hidden(tokens_N, tokens_N, layout)
    )


def test_one_view_covers_neighbours_and_follows_their_changes() -> None:
    model = decoder()
    attention = model.model.layers[0].self_attn
    maps = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert joined([linear.weight for linear in maps]) is None
    lay_side_by_side(model)
    whole, biases = (
        joined([getattr(linear, name) for linear in maps]) for name in ("weight", "bias")
    )
    assert whole is not None
    assert biases is not None
    with torch.no_grad():
        attention.v_proj.weight.fill_(3.0)
    assert torch.equal(whole, torch.cat([linear.weight for linear in maps]))
    assert torch.equal(biases, torch.cat([linear.bias for linear in maps]))
    assert joined([maps[0].weight, maps[2].weight]) is None


def test_gradients_reach_each_parameter() -> None:
    model = decoder()
    lay_side_by_side(model)
    tokens_N = torch.arange(5)
    model.hidden(tokens_N, tokens_N, PackedLayout.of([5], torch.device("cpu"))).sum().backward()
    grads = [parameter.grad for parameter in model.model.layers[0].parameters()]
    assert all(grad is not None for grad in grads)
