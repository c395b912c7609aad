"""Checkpoint folders: read whole or refused by name, and never written to by a reader."""

import json
import multiprocessing
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from homeostat.config.model import ModelConfig
from homeostat.errors import ModelError
from homeostat.models.build import load_model
from homeostat.models.hf import save_hf
from homeostat.models.lora import merged_state

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def load(folder, *, dtype=torch.float32, seed=0, **settings):
    return load_model(
        ModelConfig(path=str(folder), **settings),
        None,
        dtype=dtype,
        device=CPU,
        seed=seed,
        gradient_checkpointing=False,
    )


def write(folder, *, shard_bytes=10**9, **changes):
    """A checkpoint folder with random weights, made by ourselves."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    loaded = load(folder, init="random", seed=7)
    save_hf(
        merged_state(loaded.module),
        folder,
        source_config=loaded.sheet.source_config,
        max_shard_bytes=shard_bytes,
    )
    return folder, loaded.module


def test_a_head_of_its_own_under_tied_embeddings_is_refused(tmp_path):
    """transformers would not tie them then: it is another model."""
    folder, module = write(tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    for head in (module.output_weight().detach().clone(), torch.randn(61, 32)):
        save_file({**state, "lm_head.weight": head}, folder / "model.safetensors")
        if torch.equal(head, module.output_weight()):
            assert "lm_head.weight" not in dict(load(folder).module.named_parameters())
        else:
            with pytest.raises(ModelError, match="tie_word_embeddings to false"):
                load(folder)


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "model")[0]


@pytest.mark.parametrize("meta_init", [True, False])
@pytest.mark.parametrize("shard_bytes", [10**9, 10_000])
def test_every_parameter_comes_back(meta_init, shard_bytes, tmp_path):
    folder, module = write(tmp_path / "model", shard_bytes=shard_bytes, tie_word_embeddings=False)
    generator_state = torch.get_rng_state()
    loaded = load(folder, meta_init=meta_init)
    assert torch.equal(generator_state, torch.get_rng_state())
    assert loaded.sheet.facts["meta_init"] == meta_init
    wanted = dict(module.named_parameters())
    for name, parameter in loaded.module.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
        assert parameter.device == CPU
        assert parameter.requires_grad
    assert not list(loaded.module.buffers())


def test_weights_are_cast_on_the_way_in(folder):
    loaded = load(folder, dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    for name, parameter in loaded.module.named_parameters():
        assert torch.equal(parameter, stored[name].bfloat16())


def test_random_start_follows_the_seed_with_the_configured_spread(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "initializer_range": 0.05, "attention_bias": True})
    )
    first, again, other = (
        dict(load(tmp_path, init="random", seed=seed).module.named_parameters())
        for seed in (1, 1, 2)
    )
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        if parameter.ndim == 2:
            assert not torch.equal(parameter, other[name])
            assert parameter.detach().std() == pytest.approx(0.05, rel=0.1)
        else:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all()


def rewrite(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(NORM), r"lacks model\.norm\.weight"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "has unknown extra"),
        (lambda tensors: tensors.update({NORM: torch.ones(5)}), r"model\.norm\.weight has shape"),
        (
            lambda tensors: tensors.update({NORM: torch.ones(32, dtype=torch.int8)}),
            "looks quantised",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(folder, edit, message):
    rewrite(folder, edit)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_a_stored_tied_head_and_rotary_frequencies_are_tolerated(folder):
    def edit(tensors):
        tensors["lm_head.weight"] = tensors[EMBED].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    rewrite(folder, edit)
    assert load(folder).sheet.num_params > 0


def test_an_untied_head_must_be_there(tmp_path):
    folder, _ = write(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_never_opened(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'exit 9'\ntR.")
    for implementation in ("native", "transformers"):
        with pytest.raises(ModelError, match="pickled"):
            load(folder, implementation=implementation)


@pytest.mark.parametrize("keep", [0, 5, 200, 5000])
def test_a_truncated_file_is_named(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors.*corrupt or truncated"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path):
    folder, _ = write(tmp_path / "model", shard_bytes=10_000)
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=victim.name):
        load(folder)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path):
    folder, _ = write(tmp_path / "model", shard_bytes=10_000)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(ModelError, match="no safetensors file of its folder"):
        load(folder)


@pytest.mark.parametrize("name", [3, None, [], {"x": 1}, "/etc/passwd", "a.bin", ".."])
def test_an_index_names_only_files_of_its_folder(tmp_path, name):
    folder, _ = write(tmp_path / "model", shard_bytes=10_000)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="no safetensors file of its folder"):
        load(folder)


@pytest.mark.parametrize("victim", ["config.json", "model-00001-of-00003.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_refused_without_waiting(tmp_path, victim):
    folder, _ = write(tmp_path / "model", shard_bytes=10_000)
    (folder / victim).unlink(missing_ok=True)
    os.mkfifo(folder / victim)
    index = {"weight_map": {"a": "model-00001-of-00003.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not a plain file"):
        load(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\x00", "[" * 100_000])
def test_a_broken_config_is_named(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load(folder)


def test_a_path_that_is_not_a_model_names_the_setting(tmp_path):
    with pytest.raises(ModelError, match=r"model\.path.*does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"model\.path.*config\.json"):
        load(tmp_path)
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(ModelError, match=r"model\.path.*neither"):
        load(tmp_path / "file.txt")


def _total(module):
    return float(sum(parameter.detach().double().sum() for parameter in module.parameters()))


def _load_and_sum(folder):
    return _total(load(folder).module)


@pytest.mark.slow
def test_many_processes_may_read_one_folder_that_none_can_write_to(tmp_path):
    folder, module = write(tmp_path / "model", shard_bytes=10_000)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    os.chmod(folder, 0o555)
    try:
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            sums = pool.map(_load_and_sum, [folder] * 4)
    finally:
        os.chmod(folder, 0o755)
    assert set(sums) == {_total(module)}
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir()) == before
