"""A config that the native decoder would run differently is refused, with the way out."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from homeostat.config.model import ModelConfig
from homeostat.errors import ModelError
from homeostat.models.decoder import Decoder
from homeostat.models.families import FAMILIES, decoder_config
from homeostat.models.memory import memory_bytes, require_memory
from homeostat.models.preview import preview_model

LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
QWEN2 = {**LLAMA, "model_type": "qwen2"}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**LLAMA, "model_type": "gptj"}, "gptj"),
        ({**LLAMA, "hidden_act": "gelu"}, "gelu"),
        ({**LLAMA, "attention_dropout": 0.1}, "attention_dropout"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({**LLAMA, "rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_way_out(config, reason):
    with pytest.raises(ModelError, match=rf"(?s){reason}.*model\.implementation=transformers"):
        decoder_config(config)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA, ()),
        ({**LLAMA, "model_type": "mistral"}, (4096, 4096)),
        ({**LLAMA, "model_type": "mistral", "sliding_window": None}, ()),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 64}, (64, 64)),
        (QWEN2, ()),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1}, (None, 4096)),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 0}, (4096, 4096)),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 28}, ()),
        (
            {
                **QWEN2,
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            (None, 9),
        ),
    ],
)
def test_windows_are_those_that_transformers_reads(config, windows):
    assert decoder_config(config).block.windows == windows


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("value", [False, None])
def test_a_model_that_sees_later_tokens_is_refused(family, value):
    with pytest.raises(ModelError, match=f"is_causal is {value}"):
        decoder_config({**LLAMA, "model_type": family, "is_causal": value})


def test_quantised_weights_are_refused():
    with pytest.raises(ModelError, match="unquantised"):
        decoder_config({**LLAMA, "quantization_config": {"quant_method": "gptq"}})


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": "61"},
        {"hidden_size": None},
        {"num_hidden_layers": 0},
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"rms_norm_eps": -1.0},
        {"tie_word_embeddings": "yes"},
        {"rope_theta": "big"},
        {"rope_parameters": [1]},
        {"rope_parameters": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    ],
)
def test_a_wrong_value_is_named(change):
    with pytest.raises(ModelError, match=r"config\.json: "):
        decoder_config({**LLAMA, **change})


def test_an_error_about_a_folder_names_its_config_json(tmp_path):
    for implementation, change in (("native", {}), ("transformers", {"hidden_size": 10**12})):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "rms_norm_eps": 0, **change}))
        model = ModelConfig(path=str(tmp_path), implementation=implementation)
        with pytest.raises(ModelError) as caught:
            preview_model(model, None, dtype=torch.float32, device=torch.device("cpu"))
        assert str(tmp_path / "config.json") in str(caught.value)


def test_a_window_that_no_layer_uses_is_fine():
    assert decoder_config({**QWEN2, "use_sliding_window": True, "max_window_layers": 2}).qkv_bias
    assert decoder_config({**QWEN2, "use_sliding_window": False, "sliding_window": 8}).qkv_bias


def test_defaults_are_those_of_the_family():
    llama = decoder_config(LLAMA)
    assert (llama.num_kv_heads, llama.head_dim, llama.qkv_bias) == (4, 8, False)
    assert (llama.rope.theta, llama.rope.type) == (10_000.0, "default")
    qwen3 = decoder_config({**LLAMA, "model_type": "qwen3"})
    assert (qwen3.head_dim, qwen3.qk_norm) == (128, True)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_a_config_leaves_out_have_the_defaults_of_transformers(family):
    theirs = AutoConfig.for_model(family)
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    sizes = {**LLAMA, "head_dim": 8, **(experts if family == "dots1" else {})}
    ours = decoder_config({**sizes, "model_type": family})
    ropes = theirs.rope_parameters
    assert ours.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
ROPE_KEYS = [
    "rope_type",
    "factor",
    "rope_theta",
    "original_max_position_embeddings",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "beta_fast",
    "attention_factor",
    "partial_rotary_factor",
]


@given(
    key=st.sampled_from([*LLAMA, "rope_scaling", "layer_types", "head_dim", "hidden_act"]),
    value=json_values,
    rope=st.dictionaries(
        st.sampled_from(ROPE_KEYS), json_values | st.sampled_from(["yarn", "llama3", "linear"])
    ),
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
)
def test_whatever_config_json_holds_only_a_model_error_comes_out(key, value, rope, family):
    config = {**LLAMA, "model_type": family, "rope_parameters": rope, key: value}
    message = "config.json"
    try:
        decoder_config(config)
    except ModelError as error:
        message = str(error)
    assert "config.json" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 10**12),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**30),
        ("head_dim", 10**400),
    ],
)
def test_absurd_sizes_are_refused_by_name_before_anything_is_built(name, value):
    with pytest.raises(ModelError, match=f"config.json: {name} is"):
        decoder_config({**LLAMA, name: value})


@pytest.mark.parametrize("theta", [1, 0.5])
def test_a_base_that_yarn_cannot_use_is_refused_by_name(theta):
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": theta,
            "original_max_position_embeddings": 64}  # fmt: skip
    with pytest.raises(ModelError, match="rope_theta is"):
        decoder_config({**LLAMA, "rope_scaling": rope})


def test_sizes_that_are_absurd_together_are_refused():
    with pytest.raises(ModelError, match="more than any model has"):
        decoder_config({**LLAMA, "hidden_size": 2**24, "intermediate_size": 2**24})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_number_of_parameters_is_known_from_the_sizes(family, tied):
    shape = decoder_config(
        {**LLAMA, "model_type": family, "tie_word_embeddings": tied, "attention_bias": True,
         "mlp_bias": True}
    )  # fmt: skip
    with torch.device("meta"):
        module = Decoder(shape, kernel="sdpa")
    assert shape.num_params == sum(parameter.numel() for parameter in module.parameters())


def test_weights_beyond_all_memory_are_refused():
    cpu = torch.device("cpu")
    have = memory_bytes(cpu)
    about = {"dtype": torch.float32, "device": cpu, "what": "tiny.gguf: the sizes there make"}
    require_memory(have // 4, **about)
    with pytest.raises(ModelError, match=r"^tiny\.gguf: .*more than all the memory"):
        require_memory(have // 4 + 1, **about)
