"""Which layers low precision is about, and which of them a recipe chooses."""

from __future__ import annotations

import pytest
import torch
from tests.parity.tiny_models import SIZES

from homeostat.config.model import LoraConfig
from homeostat.errors import ModelError
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.lora import apply_lora
from homeostat.models.value_head import add_value_head
from homeostat.precision.layers import DEFAULT_SKIPS, choose, layers_of, matches

QWEN3 = {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False}
MOE = {
    "model_type": "dots1",
    "head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "sliding_window": None,
}


def decoder(**sizes) -> Decoder:
    with torch.device("meta"):
        return Decoder(decoder_config({**SIZES, **sizes}), kernel="sdpa")


def chosen(model: Decoder, *, skip=DEFAULT_SKIPS, **ends: int) -> list[str]:
    choices = choose(layers_of(model), skip=skip, setting="trainer.fp8", **ends)
    return [choice.layer.name for choice in choices if not choice.why_skipped]


def test_every_matrix_of_the_model_is_in_one_layer() -> None:
    model = decoder(**QWEN3)
    layers = layers_of(model)
    names = {f"{layer.name}.{part}" for layer in layers for part in layer.weights}
    assert names == {name for name, p in model.named_parameters() if p.ndim == 2}
    kinds = {layer.name: (layer.kind, layer.group, layer.block) for layer in layers}
    assert kinds["model.embed_tokens"] == ("embedding", "head", None)
    assert kinds["lm_head"] == ("head", "head", None)
    assert kinds["model.layers.1.self_attn.o_proj"] == ("linear", "attention", 1)
    assert kinds["model.layers.0.mlp.down_proj"] == ("linear", "mlp", 0)


def test_the_experts_of_a_block_are_one_layer_and_routers_none() -> None:
    layers = {layer.name: layer for layer in layers_of(decoder(**MOE))}
    experts = layers["model.layers.0.mlp.experts"]
    assert experts.kind == "experts"
    assert experts.shapes["gate_up_proj"] == (4, 48, SIZES["hidden_size"])
    assert layers["model.layers.0.mlp.shared_experts.up_proj"].group == "experts"
    assert not any(name.endswith("mlp.gate") for name in layers)


def test_adapters_and_value_heads() -> None:
    model = decoder(**QWEN3)
    before = [layer.name for layer in layers_of(model)]
    apply_lora(model, LoraConfig(rank=2), seed=0)
    assert [layer.name for layer in layers_of(model)] == before
    critic = decoder(**QWEN3)
    add_value_head(critic)
    assert {layer.name: layer.kind for layer in layers_of(critic)}["score"] == "head"


def test_patterns_and_ends_leave_layers_out() -> None:
    model = decoder(**QWEN3)
    everything = chosen(model)
    assert len(everything) == 7 * SIZES["num_hidden_layers"]
    assert all("layers.0." not in name for name in chosen(model, skip_first=1))
    last = SIZES["num_hidden_layers"] - 1
    assert all(f"layers.{last}." not in name for name in chosen(model, skip_last=1))
    assert all("o_proj" not in name for name in chosen(model, skip=(*DEFAULT_SKIPS, "o_proj")))
    globbed = chosen(model, skip=(*DEFAULT_SKIPS, "*.mlp.*"))
    assert globbed == [name for name in everything if ".mlp." not in name]
    assert chosen(model, skip=("re:^(?!.*q_proj)",)) == [n for n in everything if "q_proj" in n]
    # Without the defaults, embedding and head are asked for.
    assert {"model.embed_tokens", "lm_head"} <= set(chosen(model, skip=()))


@pytest.mark.parametrize(
    ("name", "pattern", "is_covered"),
    [
        ("model.embed_tokens", "embed", True),
        ("model.layers.10.mlp.up_proj", "layers.1", False),
        ("model.layers.1.mlp.up_proj", "layers.1", True),
        ("model.layers.1.mlp.up_proj", "p_proj", False),
        ("model.layers.1.mlp.up_proj", "layers.1*", False),
        ("model.layers.1.mlp.up_proj", "*.up_*", True),
        ("model.layers.1.mlp.up_proj", r"re:layers\.[12]\.", True),
    ],
)
def test_what_a_pattern_covers(name: str, pattern: str, is_covered: bool) -> None:
    assert matches(name, pattern) is is_covered


def test_what_has_no_effect_is_refused() -> None:
    model = decoder(**QWEN3, num_hidden_layers=2)
    with pytest.raises(ModelError, match="covers no layer"):
        chosen(model, skip=("q_prj",))
    with pytest.raises(ModelError, match="no regular expression"):
        chosen(model, skip=("re:(",))
    with pytest.raises(ModelError, match="leave none"):
        chosen(model, skip_first=1, skip_last=1)
    # A tied model has no lm_head: the default pattern stays silent.
    assert chosen(decoder(**QWEN3 | {"tie_word_embeddings": True}))
