"""GGUF files of Llama 3.1 and of other families are read as the HF models they were made from.

The names of tensors are those of llama.cpp's own table (gguf.get_tensor_name_map); what it stores
otherwise than the checkpoint is done here as its converter does it.
"""

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from tests.parity.test_models_gguf import load, permuted
from tests.parity.tiny_families import BLOCKS
from tests.parity.tiny_models import ROPES, random_model

from homeostat.errors import ModelError
from homeostat.models.gguf_families import llama3_settings
from homeostat.ops.attention import PackedLayout
from homeostat.ops.rope import RopeConfig, inverse_frequencies

CPU = torch.device("cpu")
LLAMA3 = {"model_type": "llama", "rope_parameters": dict(ROPES["llama3"]), "head_dim": 32}
# llama.cpp has one scale of scores per size of a head, and windows in a pattern of layers.
GEMMA2 = {**BLOCKS["gemma2"], "query_pre_attn_scalar": 16}
GEMMA3 = {**BLOCKS["gemma3"], "query_pre_attn_scalar": 16, "num_hidden_layers": 2}
GEMMA3["layer_types"] = ["sliding_attention"] * 2
CASES = {
    "llama3": (MODEL_ARCH.LLAMA, LLAMA3),
    "gemma2": (MODEL_ARCH.GEMMA2, GEMMA2),
    "gemma3": (MODEL_ARCH.GEMMA3, GEMMA3),
    "phi3": (MODEL_ARCH.PHI3, BLOCKS["phi3"]),
    "phi4_mini": (MODEL_ARCH.PHI3, BLOCKS["phi4_mini"]),
    "granite": (MODEL_ARCH.GRANITE, BLOCKS["granite"]),
    "olmo2": (MODEL_ARCH.OLMO2, BLOCKS["olmo2"]),
    "glm4": (MODEL_ARCH.GLM4, BLOCKS["glm4"]),
}


def llama3_factors(rope, head_dim):
    """The divisors of the frequencies, by the formula of llama.cpp's converter."""
    factors = []
    for place in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (place / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high, factor = (rope[k] for k in ("low_freq_factor", "high_freq_factor", "factor"))
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(factor)
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def settings_of(writer, name, config):
    """Write what the converter writes for a family beyond the common keys."""
    rope = config.rope_parameters
    if name == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, config.head_dim))
    if name.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
        rope = rope["full_attention"] if name == "gemma3" else rope
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name == "gemma3":
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_string("gemma3.rope.scaling.type", "linear")
    if name == "phi3":
        writer.add_sliding_window(config.sliding_window)
    if name == "phi4_mini":
        writer.add_rope_dimension_count(6)
        writer.add_rope_scaling_orig_ctx_len(64)
        for kind in ("short", "long"):
            factors = np.array(rope[f"{kind}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if name == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if name == "glm4":
        writer.add_rope_dimension_count(config.head_dim // 2)
    return rope["rope_theta"]


def write(path, name, model):
    arch, config = CASES[name][0], model.config
    writer = GGUFWriter(path, {"llama3": "llama", "phi4_mini": "phi3"}.get(name, name))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_rope_freq_base(settings_of(writer, name, config))
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for hf_name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        for letter, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if name in ("llama3", "granite") and f"{letter}_proj" in hf_name:
                values = permuted(values, heads)
        if name.startswith("gemma") and "norm" in hf_name:
            values = values + 1
        stem, kind = hf_name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_hf_twin(name, tmp_path):
    model = random_model(CASES[name][1], seed=1)
    write(tmp_path / "model.gguf", name, model)
    module = load(tmp_path / "model.gguf").module
    tokens = torch.randint(1, 97, (40,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        layout = PackedLayout.of([40], CPU)
        ours = module.hidden(tokens, torch.arange(40), layout) @ module.output_weight().t()
        if module.logit_cap is not None:
            ours = (ours / module.logit_cap).tanh() * module.logit_cap
        theirs = model(tokens[None]).logits[0]
    scale = max(1.0, float(theirs.abs().max()))
    torch.testing.assert_close(ours, theirs, atol=2e-5 * scale, rtol=0)


@pytest.mark.parametrize(("length", "low", "high"), [(8192, 1.0, 4.0), (4096, 1.0, 8.0)])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_settings_behind_scaled_frequencies_are_found(length, low, high, factor):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": low}
    rope |= {"high_freq_factor": high, "original_max_position_embeddings": length}
    found = llama3_settings(torch.from_numpy(llama3_factors(rope, 64)), theta=5e5, head_dim=64)
    assert found is not None
    assert found["original_max_position_embeddings"] == length
    assert found["high_freq_factor"] == pytest.approx(high, rel=1e-3)
    plain = RopeConfig(5e5)
    assert (found["factor"], found["low_freq_factor"]) == (factor, low)
    assert llama3_settings(torch.rand(32) + 2, theta=5e5, head_dim=64) is None
    assert llama3_settings(torch.ones(3), theta=5e5, head_dim=64) is None
    assert inverse_frequencies(plain, head_dim=64).shape == (32,)


def test_frequencies_scaled_in_another_manner_are_refused_with_the_file(tmp_path):
    model = random_model(LLAMA3)
    write(tmp_path / "model.gguf", "llama3", model)
    raw = (tmp_path / "model.gguf").read_bytes()
    factors = llama3_factors(model.config.rope_parameters, 32).tobytes()
    assert raw.count(factors) == 1
    odd = (np.arange(16, dtype=np.float32) % 3 + 1).tobytes()
    (tmp_path / "model.gguf").write_bytes(raw.replace(factors, odd))
    with pytest.raises(ModelError, match=r"model\.gguf.*rope_freqs"):
        load(tmp_path / "model.gguf")
