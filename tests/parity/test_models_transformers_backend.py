"""`model.implementation: transformers`: exact, packed where that is safe, refused where not."""

import pytest
import torch
from tiny_models import FAMILIES, random_model, save
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.errors import ModelError
from homeostat.models.build import load_model
from homeostat.models.lora import merged_state
from homeostat.models.transformers_model import TransformersModel
from homeostat.ops.attention import PackedLayout
from homeostat.ops.dropout import dropout_keys

CPU = torch.device("cpu")
LENGTHS = [6, 2, 9]
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 97,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
MAMBA = {
    "model_type": "mamba",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "state_size": 4,
    "vocab_size": 97,
}


def load(folder, *, adapter=None, gradient_checkpointing=False, seed=0, **settings):
    return load_model(
        ModelConfig(path=str(folder), implementation="transformers", **settings),
        adapter,
        dtype=torch.float32,
        device=CPU,
        seed=seed,
        gradient_checkpointing=gradient_checkpointing,
    )


def build(settings, *, seed=0):
    settings = dict(settings)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def batch(seed=0):
    tokens = torch.randint(0, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return tokens, positions, PackedLayout.of(LENGTHS, CPU)


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
def test_packed_logits_equal_separate_ones(attention, tmp_path):
    reference = random_model(FAMILIES["qwen2"], seed=2)
    loaded = load(save(reference, tmp_path), attention=attention)
    tokens, positions, layout = batch()
    with torch.no_grad():
        ours = loaded.module.eval().hidden(tokens, positions, layout)
        ours = ours @ loaded.module.output_weight().t()
        theirs = torch.cat([reference(row[None]).logits[0] for row in tokens.split(LENGTHS)])
    assert loaded.sheet.packs
    assert loaded.sheet.facts["attention"] == ("sdpa" if attention == "auto" else attention)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("settings", "packs"), [(GPT2, True), (MAMBA, False)])
def test_other_architectures_are_right_whether_they_pack_or_not(settings, packs, tmp_path):
    reference = build(settings, seed=4)
    loaded = load(save(reference, tmp_path))
    assert loaded.sheet.packs == packs
    tokens, positions, layout = batch(seed=3)
    with torch.no_grad():
        ours = loaded.module.eval().hidden(tokens, positions, layout)
        ours = ours @ loaded.module.output_weight().t()
        theirs = torch.cat([reference(row[None]).logits[0] for row in tokens.split(LENGTHS)])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


class Capped(nn.Module):
    def forward(self, logits):
        return 30 * torch.tanh(logits / 30)


@pytest.mark.parametrize("illness", ["cap", "scale", "bias"])
def test_logits_that_are_no_plain_product_are_refused(illness):
    causal_lm = random_model(FAMILIES["llama"])

    def spoil(module, args, output):
        change = {"cap": Capped(), "scale": lambda z: z * 0.9, "bias": lambda z: z + 0.01}
        return change[illness](output)

    causal_lm.lm_head.register_forward_hook(spoil)
    with pytest.raises(ModelError, match="soft cap, a scale or a bias"):
        TransformersModel(causal_lm).probe()


def test_a_real_soft_cap_is_refused(tmp_path):
    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
    }
    save(build({"model_type": "gemma2", **settings}), tmp_path)
    with pytest.raises(ModelError, match="soft cap"):
        load(tmp_path)


@pytest.mark.parametrize("settings", [FAMILIES["llama"], {"model_type": "gemma2", "head_dim": 8}])
def test_a_model_that_sees_later_tokens_is_refused(settings, tmp_path):
    """What it is to predict would be among what it reads."""
    settings = {**settings, "is_causal": False}
    if settings["model_type"] == "gemma2":
        settings |= {"final_logit_softcapping": None, "use_bidirectional_attention": True}
    folder = save(random_model(settings), tmp_path)
    with pytest.raises(ModelError, match="attend to later ones"):
        load(folder)


def test_checkpointing_and_adapter_dropout_together_give_the_same_gradient(tmp_path):
    save(random_model(FAMILIES["llama"]), tmp_path)
    adapter = LoraConfig(rank=2, dropout=0.5, targets=("q_proj", "down_proj"))
    gradients = []
    for gradient_checkpointing in (False, True):
        loaded = load(tmp_path, adapter=adapter, gradient_checkpointing=gradient_checkpointing)
        tokens, positions, layout = batch()
        row_ids = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))
        keys = dropout_keys(row_ids, positions, seed=1, step=1)
        loaded.module.hidden(tokens, positions, layout, dropout_keys_N=keys).pow(2).sum().backward()
        gradients.append(
            {name: p.grad for name, p in loaded.module.named_parameters() if p.requires_grad}
        )
    assert any(gradient.abs().max() > 0 for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-5)


def test_random_start_follows_the_seed_and_leaves_the_generator_alone(tmp_path):
    save(random_model(FAMILIES["llama"]), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    before = torch.get_rng_state()
    first, again, other = (
        load(tmp_path, init="random", seed=seed).module.output_weight() for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_names_of_the_saved_state_are_hugging_face_names_without_tied_doubles(tmp_path):
    reference = random_model(FAMILIES["llama_tied"])
    loaded = load(save(reference, tmp_path))
    names = [name for name, _ in merged_state(loaded.module)]
    assert sorted(names) == sorted(name for name, _ in reference.named_parameters())


def test_missing_and_unexpected_weights_are_refused(tmp_path):
    model = random_model(FAMILIES["llama"])
    del model.model.layers[1].mlp.up_proj
    save(model, tmp_path)
    with pytest.raises(ModelError, match=r"missing keys.*up_proj"):
        load(tmp_path)


def test_a_model_with_dropout_of_its_own_is_refused_with_the_settings(tmp_path):
    save(build({**GPT2, "resid_pdrop": 0.1}), tmp_path)
    before = torch.get_rng_state()
    with pytest.raises(ModelError, match=r"resid_pdrop=0\.1.*config\.json"):
        load(tmp_path)
    assert torch.equal(before, torch.get_rng_state())


def test_code_in_the_checkpoint_is_never_run(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "odd", "auto_map": {"AutoConfig": "odd.Config", '
        '"AutoModelForCausalLM": "odd.Model"}}'
    )
    (tmp_path / "odd.py").write_text("import pathlib; pathlib.Path(__file__).unlink()")
    with pytest.raises(ModelError, match=r"model\.path"):
        load(tmp_path, init="random")
    assert (tmp_path / "odd.py").exists()
