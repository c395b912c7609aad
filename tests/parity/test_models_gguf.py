"""A GGUF file written by llama.cpp's own library is read as the HF model it was made from."""

import json
import random
import re
import sys

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import dequantize, quantize
from tests.support.rounding import assert_right_to_rounding
from tiny_models import random_model

from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.data.tokenizer import load_tokenizer
from homeostat.errors import MissingDependencyError, ModelError
from homeostat.models.adapter_files import find_base, save_adapter
from homeostat.models.build import load_model
from homeostat.models.families import decoder_config
from homeostat.models.gguf import GgufFile
from homeostat.models.preview import preview_model
from homeostat.ops.attention import PackedLayout

CPU = torch.device("cpu")
# Rows must be a multiple of 32 for the quantised types.
WIDE = {"intermediate_size": 64}
CASES = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True, **WIDE},
    "llama_untied": {"model_type": "llama", "attention_bias": True, **WIDE},
    "qwen2": {"model_type": "qwen2", **WIDE},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, **WIDE},
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name):
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, block, inner = stem.split(".", 3)
        return f"blk.{block}.{NAMES[inner]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permuted(values, num_heads):
    """Rows of each head from halves to neighbouring pairs, as the converter to GGUF does."""
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(values.shape)


def write_gguf(path, model, *, quantised=None, **extra):
    """Writes the file, and rounds the model's own weights as the file rounds them."""
    config, architecture = model.config, model.config.model_type
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
    for key, value in extra.items():
        getattr(writer, key)(value)
    for name, parameter in model.named_parameters():
        _add(writer, name, parameter, config, quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer, name, parameter, config, quantised):
    values = parameter.detach().numpy().copy()
    for letter, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        if config.model_type == "llama" and f"{letter}_proj" in name:
            values = permuted(values, heads)
    if quantised is None or values.ndim == 1:
        writer.add_tensor(gguf_name(name), values)
        return
    rounded = quantize(parameter.detach().numpy(), quantised)
    parameter.data.copy_(torch.from_numpy(dequantize(rounded, quantised)))
    writer.add_tensor(gguf_name(name), quantize(values, quantised), raw_dtype=quantised)


def load(path):
    return load_model(
        ModelConfig(path=str(path)),
        None,
        dtype=torch.float32,
        device=CPU,
        seed=0,
        gradient_checkpointing=False,
    )


@pytest.mark.parametrize("quantised", [None, "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_hf_twin(case, quantised, tmp_path):
    model = random_model(CASES[case], seed=1)
    kind = None if quantised is None else GGMLQuantizationType[quantised]
    write_gguf(tmp_path / "model.gguf", model, quantised=kind)
    loaded = load(tmp_path / "model.gguf")
    tokens = torch.randint(0, 97, (19,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        layout = PackedLayout.of([19], CPU)
        ours = loaded.module.hidden(tokens, torch.arange(19), layout)
        ours = ours @ loaded.module.output_weight().t()
        theirs = model(tokens[None]).logits[0]
        exact = model.double()(tokens[None]).logits[0]
    assert_right_to_rounding(ours, theirs, exact=exact)


def test_an_adapter_on_a_gguf_base_is_found_by_peft_and_by_us(tmp_path):
    from peft import AutoPeftModelForCausalLM

    model = random_model(CASES["llama"], seed=1)
    write_gguf(tmp_path / "model.gguf", model, add_vocab_size=97)
    lora = LoraConfig(rank=2, targets=("q_proj",))
    own = load_model(
        ModelConfig(path=str(tmp_path / "model.gguf")), lora, dtype=torch.float32, device=CPU,
        seed=0, gradient_checkpointing=False,
    )  # fmt: skip
    folder = tmp_path / "adapter"
    save_adapter(own.module, folder, lora, base=ModelConfig(path=str(tmp_path / "model.gguf")))
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path)
    assert find_base(folder, settings) == str(tmp_path / "model.gguf")
    theirs = AutoPeftModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
    tokens = torch.arange(9)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens[None]).logits, model(tokens[None]).logits)


def test_the_config_is_that_of_the_hf_twin(tmp_path):
    model = random_model(CASES["qwen3"])
    write_gguf(tmp_path / "model.gguf", model)
    config = load(tmp_path / "model.gguf").sheet.source_config
    twin = {**model.config.to_dict(), "initializer_range": 0.02}
    ours, theirs = decoder_config(config), decoder_config(twin)
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    for name in ("vocab_size", "head_dim", "num_kv_heads", "rope", "tie_embeddings", "qk_norm"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_linear_rope_scaling_is_read(tmp_path):
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    model = random_model({**CASES["llama"], "rope_parameters": scaled})
    write_gguf(
        tmp_path / "model.gguf",
        model,
        add_rope_scaling_type=RopeScalingType.LINEAR,
        add_rope_scaling_factor=4.0,
    )
    rope = decoder_config(load(tmp_path / "model.gguf").sheet.source_config).rope
    assert (rope.type, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"add_layer_norm_rms_eps": -0.0}, "llama.attention.layer_norm_rms_epsilon"),
        ({"add_rope_freq_base": -1.0}, "llama.rope.freq_base"),
        ({"add_head_count": 3}, "llama.attention.head_count"),
        ({"add_head_count_kv": 3}, "llama.attention.head_count_kv"),
        ({"add_head_count_kv": 0}, "llama.attention.head_count_kv"),
        ({"add_key_length": 7}, "llama.attention.key_length"),
        ({"add_block_count": 2**31}, "llama.block_count"),
        ({"add_context_length": 2**31}, "llama.context_length"),
        ({"add_embedding_length": 2**30}, "llama.embedding_length"),
        ({"add_head_count": 2**16}, "llama.embedding_length / llama.attention.head_count"),
        (
            {"add_rope_scaling_type": RopeScalingType.LINEAR, "add_rope_scaling_factor": 0.0},
            "llama.rope.scaling.factor",
        ),
        ({"add_rope_scaling_type": RopeScalingType.LONGROPE}, "llama.rope.scaling.type"),
    ],
)
def test_a_bad_number_names_the_gguf_file_and_the_metadata_key(change, key, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, random_model(CASES["llama"]), **change)
    with pytest.raises(ModelError) as caught:
        preview_model(ModelConfig(path=str(path)), None, dtype=torch.float32, device=CPU)
    message = str(caught.value)
    assert message.startswith(f"model.path: {path}"), message
    assert key in message
    assert "config.json" not in message


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({}, "tokenizer.ggml.tokens"),
        ({"add_bos_token_id": 2**31 + 5}, "tokenizer.ggml.bos_token_id"),
        ({"add_pad_token_id": 97}, "tokenizer.ggml.padding_token_id"),
        ({"add_unk_token_id": 97}, "tokenizer.ggml.unknown_token_id"),
        ({"add_chat_template": "{% if %}"}, "tokenizer.chat_template"),
    ],
)
def test_a_bad_tokenizer_names_the_gguf_file_and_the_metadata_key(change, key, tmp_path):
    path = tmp_path / "model.gguf"
    if change:
        write_with_tokenizer(path, **change)
    else:
        write_gguf(path, random_model(CASES["llama"]))
    with pytest.raises(ModelError, match=re.escape(key)) as caught:
        load_tokenizer(ModelConfig(path=str(path)))
    assert str(caught.value).startswith(f"model.path: {path}")


def test_stored_rotary_frequencies_are_refused(tmp_path):
    model = random_model(CASES["llama"])
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    for name in ("block_count", "context_length", "feed_forward_length"):
        getattr(writer, f"add_{name}")(2)
    writer.add_tensor("token_embd.weight", model.model.embed_tokens.weight.detach().numpy())
    writer.add_tensor("rope_freqs.weight", np.array([1, 3, 2, 5], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="rotary frequencies"):
        load(tmp_path / "model.gguf")


def test_without_the_package_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'homeostat\[gguf\]'"):
        load(tmp_path / "model.gguf")


def test_other_architectures_and_broken_files_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'gpt2'.*llama, qwen2, qwen3"):
        load(path)
    write_gguf(path, random_model(CASES["llama"]))
    whole = path.read_bytes()
    for keep in (0, 3, 40, 300, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:keep])
        with pytest.raises(ModelError, match=r"model\.path.*model\.gguf"):
            load(path)


def write_with_tokenizer(path, **extra):
    """A model of 97 tokens and its tokenizer in one file, as llama.cpp's converter writes them."""
    words = ["<unk>", "<s>", "</s>", *(chr(ord("a") + n) * (n // 26 + 1) for n in range(94))]
    kinds = [2, 3, 3, *[1] * 94]
    write_gguf(
        path,
        random_model(CASES["llama"]),
        add_tokenizer_model="llama",
        add_token_list=words,
        add_token_scores=[0.0] * 97,
        add_token_types=kinds,
        **extra,
    )
    return path.read_bytes()


def refuse_or_read(path):
    """Whether the file was refused, by the model's reader or the tokenizer's, as a ModelError."""
    try:
        file = GgufFile(path)
        file.config()
        list(file.tensors())
        load_tokenizer(ModelConfig(path=str(path)))
    except ModelError:
        return True
    return False


def test_a_download_cut_short_is_refused_wherever_it_was_cut(tmp_path):
    path = tmp_path / "model.gguf"
    whole = write_with_tokenizer(path)
    assert not refuse_or_read(path)
    for keep in range(0, len(whole), len(whole) // 60):
        path.write_bytes(whole[:keep])
        with pytest.raises(ModelError, match=r"model\.path.*model\.gguf.*truncated"):
            load_tokenizer(ModelConfig(path=str(path)))
        assert refuse_or_read(path)


def test_lengths_and_types_that_cannot_be_are_refused_at_once(tmp_path):
    """Without bounds a count of 2**40 is a loop without end, and an offset leaves the file."""
    path = tmp_path / "model.gguf"
    whole = write_with_tokenizer(path)
    rng = random.Random(3)
    ends = whole.index(b"output_norm")
    num_refused = 0
    for _ in range(24):
        at = rng.randrange(8, ends)
        value = rng.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1])
        path.write_bytes(whole[:at] + value.to_bytes(8, "little") + whole[at + 8 :])
        num_refused += refuse_or_read(path)
    assert num_refused > 8
