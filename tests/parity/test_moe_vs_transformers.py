"""Models with experts are the transformers models: logits, gradients, files, both ways."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.test_models_vs_transformers import (
    load,
    loss_of,
    packed_logits,
    reference_loss,
    rows,
    separate_logits,
)
from tests.parity.tiny_models import SIZES, edit_config
from tests.parity.tiny_moe import MOE, saved_moe
from transformers import AutoModelForCausalLM

from homeostat.config.model import ModelConfig
from homeostat.errors import ModelError
from homeostat.models import hf
from homeostat.models.build import load_model
from homeostat.models.families import decoder_config
from homeostat.models.float64 import reference_logprobs
from homeostat.models.hf import save_hf
from homeostat.models.hub_names import stacked_tensors
from homeostat.models.lora import merged_state
from homeostat.models.preview import preview_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=sorted(MOE))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def saved(family, tmp_path_factory):
    """A checkpoint under the hub's names, and its model."""
    folder = tmp_path_factory.mktemp(family)
    return folder, saved_moe(family, folder, seed=11)


def test_logits_equal_transformers(saved):
    folder, reference = saved
    loaded = load(folder)
    documents = rows(seed=1)
    with torch.no_grad():
        ours, theirs = (
            packed_logits(loaded.module, documents),
            separate_logits(reference, documents),
        )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    num_biases = sum(buffer.numel() for name, buffer in reference.named_buffers() if "bias" in name)
    assert loaded.sheet.num_params == reference.num_parameters() + num_biases
    assert loaded.module.config.num_params == loaded.sheet.num_params
    assert loaded.module.config.num_active_params < loaded.sheet.num_params


@pytest.mark.parametrize("gradient_checkpointing", [False, "selective", True])
def test_gradients_of_all_parameters_equal_transformers(saved, gradient_checkpointing):
    folder, reference = saved
    module = load(folder, gradient_checkpointing=gradient_checkpointing).module
    documents = [document for document in rows(seed=4) if len(document) > 1]
    reference.zero_grad()
    loss_of(module, documents).backward()
    reference_loss(reference, documents).backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in module.named_parameters():
        if name.endswith("e_score_correction_bias"):
            assert parameter.grad is None
            continue
        wanted_grad = wanted.pop(name)
        scale = float(wanted_grad.abs().max())
        torch.testing.assert_close(
            parameter.grad, wanted_grad, atol=2e-5 * max(1.0, scale), rtol=0, msg=name
        )
    assert not wanted


def test_checkpoint_comes_out_byte_for_byte_and_transformers_reads_it(saved, tmp_path):
    folder, reference = saved
    loaded = load(folder)
    save_hf(merged_state(loaded.module), tmp_path, source_config=loaded.sheet.source_config)
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    documents = rows(seed=9)
    with torch.no_grad():
        theirs, want = separate_logits(again, documents), separate_logits(reference, documents)
    torch.testing.assert_close(theirs, want, atol=1e-5, rtol=1e-5)


def test_stacked_names_of_transformers_are_read_too(saved, tmp_path):
    folder, reference = saved
    fused = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    if reference.config.tie_word_embeddings:
        del fused["lm_head.weight"]
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in fused)
    shutil.copy(folder / "config.json", tmp_path)
    save_file(fused, tmp_path / "model.safetensors")
    pair = [dict(load(place).module.named_parameters()) for place in (folder, tmp_path)]
    for name, parameter in pair[0].items():
        assert torch.equal(parameter, pair[1][name]), name


def test_float64_reference_gives_the_log_probs_of_transformers(saved):
    folder, reference = saved
    shape = decoder_config(hf.read_config(folder))
    weights = dict(stacked_tensors(shape.moe, hf.read_tensors(folder)))
    tokens_T = np.random.default_rng(5).integers(0, SIZES["vocab_size"], 37)
    found = reference_logprobs(shape, weights, tokens_T)
    with torch.no_grad():
        # The router of transformers rounds to fp32 whatever it is given.
        logits_TV = reference(torch.from_numpy(tokens_T)[None]).logits[0, :-1].double()
    logp_TV = logits_TV.log_softmax(dim=-1)
    wanted = logp_TV.gather(1, torch.from_numpy(tokens_T)[1:, None])[:, 0].numpy()
    assert np.abs(found - wanted).max() < 1e-5


def edited(folder: Path, to: Path, change) -> Path:
    """Copy a checkpoint with its tensors changed."""
    shutil.copy(folder / "config.json", to)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    return to


def refused_by_all(folder: Path) -> str:
    """Return the message, which is the same when loading and when only looking."""
    config = ModelConfig(path=str(folder))
    with pytest.raises(ModelError) as loading:
        load(folder)
    with pytest.raises(ModelError) as looking:
        preview_model(config, None, dtype=torch.float32, device=CPU)
    assert str(loading.value) == str(looking.value)
    return str(loading.value)


def expert_name(family: str, expert: int, matrix: str) -> str:
    words = {"gate": "w1", "up": "w3", "down": "w2"}
    if family == "mixtral":
        return f"model.layers.2.block_sparse_moe.experts.{expert}.{words[matrix]}.weight"
    return f"model.layers.2.mlp.experts.{expert}.{matrix}_proj.weight"


@pytest.fixture(params=["mixtral", "dots1"])
def sound(request, tmp_path):
    (tmp_path / "sound").mkdir()
    saved_moe(request.param, tmp_path / "sound")
    return request.param, tmp_path / "sound", tmp_path


def test_experts_that_do_not_fit_are_refused_by_name(sound):
    family, folder, place = sound
    name = expert_name(family, 1, "up")

    def lost(tensors):
        del tensors[name], tensors[expert_name(family, 3, "gate")]

    def odd(tensors):
        tensors[name] = tensors[name][:, :-1].contiguous()

    def extra(tensors):
        tensors[name.replace("experts.1.", "experts.99.")] = tensors[name].clone()

    def narrow(tensors):
        for expert in range(8):
            key = expert_name(family, expert, "down")
            if key in tensors:
                tensors[key] = tensors[key][:, :-2].contiguous()

    said = refused_by_all(edited(folder, place, lost))
    assert f"it lacks {name} and 1 more of its layer" in said
    assert str(place) in said
    said = refused_by_all(edited(folder, place, odd))
    assert f"{name} has shape (24, 31)" in said
    assert "(24, 32)" in said
    said = refused_by_all(edited(folder, place, extra))
    assert f"it has {name.replace('experts.1.', 'experts.99.')}" in said
    said = refused_by_all(edited(folder, place, narrow))
    assert f"{expert_name(family, 0, 'down')} has shape (32, 22)" in said


MISTAKES = [
    ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts is 0"),
    ("qwen3_moe", {"moe_intermediate_size": "24"}, "moe_intermediate_size is '24'"),
    ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
    ("dots1", {"n_group": 3}, "n_group is 3"),
    ("dots1", {"topk_group": 5}, "topk_group is 5"),
    ("dots1", {"num_experts_per_tok": 5}, "topk_group have 4 experts"),
    ("dots1", {"n_group": 8, "topk_group": 8}, "a group needs two experts"),
    ("dots1", {"n_routed_experts": 2**40}, "more than any model has"),
]


@pytest.mark.parametrize(("family", "change", "said"), MISTAKES)
def test_mistakes_in_the_config_are_named(family, change, said):
    model_type = MOE[family]["model_type"]
    with pytest.raises(ModelError, match=said):
        decoder_config({**SIZES, **MOE[family], "model_type": model_type, **change})


def test_a_cast_model_keeps_its_expert_bias_in_fp32(tmp_path):
    reference = saved_moe("dots1", tmp_path)
    module = load_model(
        ModelConfig(path=str(tmp_path)),
        None,
        dtype=torch.bfloat16,
        device=CPU,
        seed=0,
        gradient_checkpointing=False,
    ).module
    gate = module.layers[2].mlp.gate
    assert gate.weight.dtype == torch.bfloat16
    assert gate.e_score_correction_bias.dtype == torch.float32
    want = dict(reference.named_buffers())["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert torch.equal(gate.e_score_correction_bias, want)
    with torch.no_grad():
        ours, theirs = (packed_logits(m, rows(seed=3)) for m in (module, load(tmp_path).module))
    assert (ours.float() - theirs).abs().mean() < 0.05


def test_a_config_without_expert_layers_is_a_dense_model(tmp_path):
    saved_moe("qwen3_moe", tmp_path)
    edit_config(tmp_path, mlp_only_layers=[0, 1, 2])
    assert decoder_config(json.loads((tmp_path / "config.json").read_text())).moe is None
