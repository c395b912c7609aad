"""INT4 weights: what rounding gives, what training with it does, and what files hold."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support import runs, tiny
from torch import Tensor

from homeostat.config.int4 import FLAG_VARIABLE, GROUP_VARIABLE, Int4Config
from homeostat.config.loading.load import build_config
from homeostat.config.native import NativeEngineConfig
from homeostat.errors import ConfigError, EngineError, ModelError
from homeostat.generation.choice import choose
from homeostat.generation.exporting import export_model
from homeostat.generation.loading import load_weights
from homeostat.models.build import load_model
from homeostat.models.decoder import Decoder
from homeostat.ops.attention import PackedLayout
from homeostat.precision.int4 import (
    dequantise,
    fake_quantise,
    pack,
    quantise,
    straight_through,
    unpack,
)
from homeostat.precision.int4_rewrite import Int4Rewrite, int4_choices
from homeostat.rollout.native.compact import can_be_copied
from homeostat.rollout.native.engine import NativeEngine
from homeostat.rollout.native.int4_model import Int4Model
from homeostat.run.preflight.check import Preflight
from homeostat.train.saving.shards import TensorReader
from homeostat.types import TokenRow

INT4 = {"int4": {"group_size": 32}}


def weights(seed: int = 0) -> Tensor:
    """Groups of all magnitudes, one of zeros, one of subnormals."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 128, generator=generator) * torch.logspace(-35, 35, 40)[:, None]
    weight[0], weight[1] = 0.0, 1e-40
    return weight


# ---- rounding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 128])
def test_rounding_is_to_the_nearest_integer_of_a_scale_of_five_bits(size: int, dtype) -> None:
    """Against numpy in float64."""
    weight = weights().to(dtype)
    grouped = weight.double().numpy().reshape(40, -1, size)
    largest = np.abs(grouped).max(-1, keepdims=True)
    mantissa, exponent = np.frexp(largest / 7)
    scale = np.ldexp(np.round(mantissa * 32) / 32, exponent)
    scale = np.where(largest < 2.0**-100, 1.0, scale)
    wanted = np.round(grouped / scale)
    found = quantise(weight, group_size=size)
    assert np.array_equal(found.scales_G.double().numpy(), scale[..., 0])
    assert np.array_equal(found.values_K.numpy(), wanted.reshape(40, -1))
    assert np.abs(found.values_K.numpy()).max() == 7
    rounded = fake_quantise(weight, group_size=size)
    assert rounded.dtype == dtype
    assert np.array_equal(rounded.double().numpy(), (wanted * scale).reshape(40, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rounded_weight_is_exact_in_every_dtype_and_rounds_to_itself(dtype) -> None:
    rounded = fake_quantise(weights(1).to(dtype), group_size=64)
    assert torch.equal(rounded.bfloat16().float(), rounded.float())
    assert torch.equal(fake_quantise(rounded, group_size=64), rounded)
    quantised = quantise(rounded, group_size=64)
    assert torch.equal(dequantise(quantised, dtype=dtype), rounded)
    assert not torch.signbit(rounded[rounded == 0]).any()


def test_what_is_not_finite_is_not_hidden() -> None:
    weight = torch.ones(2, 64)
    weight[0, 3], weight[1, 40] = math.inf, math.nan
    is_nan = fake_quantise(weight, group_size=32).isnan()
    assert is_nan[0, :32].all()
    assert is_nan[1, 32:].all()
    assert int(is_nan.sum()) == 64
    with pytest.raises(ModelError, match=r"q_proj holds numbers that are not finite"):
        quantise(weight, group_size=32, name="q_proj")


def test_packed_words_hold_eight_integers_from_the_lowest_bits_on() -> None:
    values = torch.randint(-7, 8, (5, 64), dtype=torch.int8)
    words = pack(values)
    assert words.dtype == torch.int32
    unsigned = words.numpy().astype(np.int64) & 0xFFFFFFFF
    wanted = [(unsigned >> (4 * place)) & 15 for place in range(8)]
    assert np.array_equal(np.stack(wanted, -1).reshape(5, 64) - 8, values.numpy())
    assert torch.equal(unpack(words), values)


def test_the_gradient_passes_the_rounding_unchanged() -> None:
    weight = torch.randn(4, 32, requires_grad=True)
    rounded = fake_quantise(weight, group_size=32)
    x, factor = torch.randn(3, 32, requires_grad=True), torch.randn(3, 4)
    (torch.nn.functional.linear(x, straight_through(weight, rounded)) * factor).sum().backward()
    assert weight.grad is not None
    assert x.grad is not None
    torch.testing.assert_close(weight.grad, factor.T @ x.detach())
    torch.testing.assert_close(x.grad, factor @ rounded)


# ---- a model -----------------------------------------------------------------------------------


def tiny_model(folder: Path, **changes: object) -> Decoder:
    from homeostat.config.model import ModelConfig

    tiny.write_model(folder / "model", **changes)
    config = ModelConfig(path=str(folder / "model"), init="random")
    how = {"dtype": torch.float32, "device": torch.device("cpu"), "seed": 0}
    return load_model(config, None, gradient_checkpointing=False, **how).module


def hidden(model: Decoder) -> Tensor:
    tokens = torch.arange(3, 24)
    layout = PackedLayout.of([len(tokens)], torch.device("cpu"))
    return model.hidden(tokens, torch.arange(len(tokens)), layout)


def test_a_rewritten_model_computes_with_rounded_weights_from_its_first_step_on(tmp_path) -> None:
    model, other = tiny_model(tmp_path), tiny_model(tmp_path)
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    rewrite = Int4Rewrite(model, Int4Config(group_size=32, start_step=3))
    assert torch.equal(hidden(model), hidden(other))
    # Engines that copy weights must not take this model for a plain one, before the switch either.
    assert can_be_copied(other)
    assert not can_be_copied(model)
    rewrite.begin_step(3)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "layers" in name and parameter.ndim == 2:
                parameter.copy_(fake_quantise(parameter, group_size=32))
    assert torch.equal(hidden(model), hidden(other))
    hidden(model).square().sum().backward()
    hidden(other).square().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name
    # Rounded once after an update, not whenever the weights are read.
    with torch.no_grad():
        model.layers[0].mlp.up_proj.weight.mul_(2)
    assert torch.equal(hidden(model), hidden(other))
    rewrite.weights_changed()
    assert not torch.equal(hidden(model), hidden(other))
    before = {name: rounded.data_ptr() for name, rounded in rewrite.computed_weights().items()}
    rewrite.begin_step(2)
    assert not rewrite.computed_weights()
    # What was captured of an engine reads the copies where they are.
    rewrite.begin_step(3)
    after = {name: rounded.data_ptr() for name, rounded in rewrite.computed_weights().items()}
    assert after == before


@pytest.mark.parametrize("packs", [True, False])
def test_an_engine_in_int4_beside_another_trainer_has_a_model_of_its_own(tmp_path, packs) -> None:
    """Groups of 32 are the coarsest that fit a width of 96; new weights are seen at a commit."""
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 1}
    model, other = tiny_model(tmp_path, **sizes), tiny_model(tmp_path, **sizes)
    served = Int4Model(model, packs=packs)
    assert served.config.group_size == 32
    for factor in (1.0, 1.7):
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                mine.mul_(factor)
                is_packed = theirs.ndim == 2 and theirs.shape[0] != model.config.vocab_size
                theirs.copy_(fake_quantise(mine, group_size=32) if is_packed else mine)
        served.weights_changed()
        assert torch.equal(hidden(served.model), hidden(other))
        assert not torch.equal(hidden(model), hidden(other))


def test_the_engine_reads_its_precision(tmp_path) -> None:
    model = tiny_model(tmp_path)
    how = {"device": torch.device("cpu"), "max_tokens": 32, "decode": None, "chunk_bytes": 2**16}
    engine = NativeEngine(model, NativeEngineConfig(quantization="int4"), **how)
    assert engine.bursts is None
    row = TokenRow(0, np.arange(3, 20), np.ones(17, np.float32))
    (found,) = engine.score([row], temperature=1.0)
    (plain,) = NativeEngine(model, NativeEngineConfig(), **how).score([row], temperature=1.0)
    Int4Rewrite(model, Int4Config(group_size=32))
    (wanted,) = NativeEngine(model, NativeEngineConfig(), **how).score([row], temperature=1.0)
    assert found.tolist() == wanted.tolist() != plain.tolist()
    with pytest.raises(EngineError, match="INT4 weights are multiplied, rounded"):
        NativeEngine(model, NativeEngineConfig(decode="compiled"), **how)


def test_layers_whose_groups_do_not_divide_are_all_named(tmp_path) -> None:
    model = tiny_model(tmp_path, hidden_size=96, intermediate_size=64, num_hidden_layers=1)
    with pytest.raises(ModelError) as error:
        int4_choices(model, Int4Config(group_size=64))
    text = str(error.value)
    assert "q_proj (96)" in text
    assert "up_proj (96)" in text
    assert "down_proj" not in text
    assert "group_size=32 (sizes that fit all: 32)" in text
    skipped = Int4Config(group_size=64, skip_layers=("self_attn", "gate_proj", "up_proj"))
    chosen = [c.layer.name for c in int4_choices(model, skipped) if not c.why_skipped]
    assert chosen == ["model.layers.0.mlp.down_proj"]
    with pytest.raises(ModelError, match="nothing would be rounded"):
        int4_choices(model, Int4Config(skip_layers=("layers",)))


# ---- settings ----------------------------------------------------------------------------------


def test_the_environment_is_followed_where_the_recipe_is_silent(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(FLAG_VARIABLE, "1")
    monkeypatch.setenv(GROUP_VARIABLE, "32")
    config = tiny.config(tmp_path)
    assert config.trainer.int4 == Int4Config(group_size=32)
    items = {item.name: item for item in Preflight(config, progress=lambda *_: None).run()}
    assert f"{FLAG_VARIABLE}=1 is followed" in items["precision"].text
    assert tiny.config(tmp_path, "trainer.int4=null").trainer.int4 is None
    other = tiny.config(tmp_path, "trainer.int4.start_step=2").trainer.int4
    assert other == Int4Config(start_step=2)
    with pytest.raises(ConfigError, match=f"{FLAG_VARIABLE}=1 turns trainer.int4 on"):
        tiny.config(tmp_path, lora={"rank": 2})
    monkeypatch.setenv(FLAG_VARIABLE, "yes")
    with pytest.raises(ConfigError, match="must be 0 or 1"):
        tiny.config(tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lora": {"rank": 2}}, "an adapter and freezes the weights"),
        ({"trainer": {**INT4, "fp8": {}}}, "a layer can have only one precision"),
        ({"model": {"implementation": "transformers"}}, "native decoder"),
        ({"trainer": {"int4": {"start_step": 9}, "max_steps": 6}}, "ends after step 6"),
        (
            {"trainer": {**INT4, "backend": {"type": "fsdp"}}, "cluster": {"type": "torchrun"}},
            "splits the weights over ranks",
        ),
    ],
)
def test_what_cannot_be_rounded_is_refused(tmp_path, change, why) -> None:
    raw = tiny.recipe(tmp_path, **{"trainer": INT4, **change})
    with pytest.raises(ConfigError, match=why):
        build_config(raw, [], file=None)


# ---- runs and their exports --------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that rounds from its third step on, and its packed export."""
    folder = tmp_path_factory.mktemp("int4")
    trainer = {"int4": {"group_size": 32, "start_step": 3}, "max_steps": 5}
    config = tiny.config(folder, trainer=trainer, checkpoint={"export": "final", "keep_last": 9})
    runs.train(config)
    return config


def test_a_resumed_run_switches_at_the_same_step(run, tmp_path) -> None:
    shutil.copytree(Path(run.runs_dir).parent, tmp_path / "copy")
    trainer = {"int4": {"group_size": 32, "start_step": 3}, "max_steps": 5}
    again = tiny.config(
        tmp_path / "copy", trainer=trainer, checkpoint={"export": "off", "load_step": 2}
    )
    again = again.model_copy(update={"model": run.model, "data": run.data})
    runs.train(again)
    assert runs.final_tensors(again) == runs.final_tensors(run)
    plain = tiny.config(tmp_path, name="plain", trainer={"max_steps": 5})
    runs.train(plain)
    assert runs.losses(plain)[:2] == runs.losses(run)[:2]
    assert runs.losses(plain)[2:] != runs.losses(run)[2:]


def test_the_export_of_a_run_is_packed_and_holds_the_rounded_weights(run) -> None:
    """Unpacked here by numpy."""
    found = choose(run.run_dir)
    folder = Path(found.model.path)
    config = json.loads((folder / "config.json").read_text())
    entry = config["quantization_config"]
    assert (entry["quant_method"], entry["format"]) == ("compressed-tensors", "pack-quantized")
    assert entry["ignore"] == ["lm_head"]
    assert entry["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert config["dtype"] == "float32"
    stored, packed = trained(found), load_file(folder / "model.safetensors")
    names = [name for name in stored if "layers" in name and stored[name].ndim == 2]
    assert len(names) == 14
    for name in names:
        prefix = name.removesuffix("weight")
        words = packed[f"{prefix}weight_packed"].numpy().astype(np.int64) & 0xFFFFFFFF
        values = np.stack([(words >> (4 * place)) & 15 for place in range(8)], -1) - 8
        scales = packed[f"{prefix}weight_scale"].numpy()
        weight = values.reshape(len(words), -1, 32) * scales[..., None]
        wanted = fake_quantise(stored[name], group_size=32).numpy()
        assert np.array_equal(weight.reshape(len(words), -1).astype(np.float32), wanted)
        assert packed[f"{prefix}weight_shape"].tolist() == list(wanted.shape)
        assert name not in packed


def trained(found) -> dict[str, Tensor]:
    """The weights that a run's checkpoint holds: those that are trained, not rounded."""
    assert found.exported is not None
    return TensorReader(found.exported.path, "model").whole()


def test_a_packed_model_is_read_and_exported_again_without_change(run, tmp_path) -> None:
    found = choose(run.run_dir)
    how = {"device": torch.device("cpu"), "dtype": torch.float32}
    loaded = load_weights(found, **how).module
    for name, tensor in trained(found).items():
        wanted = tensor
        if "layers" in name and tensor.ndim == 2:
            wanted = fake_quantise(tensor, group_size=32)
        assert torch.equal(loaded.get_parameter(name), wanted), name
    export_model(found, tmp_path / "again")
    one, other = (
        load_file(Path(f) / "model.safetensors") for f in (found.model.path, tmp_path / "again")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    export_model(found, tmp_path / "plain", quantization="none", dtype="bf16")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    dense = load_file(tmp_path / "plain" / "model.safetensors")
    # Not the rounded ones that the export beside the checkpoint holds.
    assert all(torch.equal(dense[name], one.bfloat16()) for name, one in trained(found).items())
    with pytest.raises(ModelError, match="trained for INT4 groups of 32"):
        export_model(found, tmp_path / "other", group_size=64)


@pytest.mark.parametrize("step", [2, 4, 5])
def test_a_checkpoint_is_used_as_the_run_computed_with_it(run, step, tmp_path) -> None:
    """Rounded from the third step on, whether or not it was exported, and however it is named."""
    shutil.copytree(run.run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("hf"))
    runs.sign(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
    named = run.run_dir / "checkpoints" / f"step_{step:08d}"
    how = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    stored = TensorReader(named, "model").whole()
    for found in (choose(run.run_dir, step=str(step)), choose(tmp_path / "run", step=str(step))):
        assert choose(named).model == choose(run.run_dir, step=str(step)).model
        plain = load_weights(found, rounds=False, **how).module
        rounded = load_weights(found, **how).module
        for name, tensor in stored.items():
            wanted = tensor
            if "layers" in name and tensor.ndim == 2 and step >= 3:
                wanted = fake_quantise(tensor, group_size=32)
            assert torch.equal(plain.get_parameter(name), tensor.bfloat16()), name
            assert torch.equal(rounded.get_parameter(name), wanted.bfloat16()), name


def test_a_remedy_that_moved_the_first_step_is_in_force_for_the_export(run, tmp_path) -> None:
    shutil.copytree(run.run_dir, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step_00000004"
    state = json.loads((folder / "state.json").read_text())
    state["health"]["healing"]["overlay"] = {"trainer.int4.start_step": {"value": 5, "step": 4}}
    (folder / "state.json").write_text(json.dumps(state))
    assert choose(run.run_dir, step="4").int4 == Int4Config(group_size=32, start_step=3)
    runs.sign(folder)
    assert choose(tmp_path / "run", step="4").int4 is None


def test_transformers_reads_the_export_and_gives_the_same_logits(run) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    found = choose(run.run_dir)
    theirs = AutoModelForCausalLM.from_pretrained(found.model.path, dtype=torch.float32)
    mine = load_weights(found, device=torch.device("cpu"), dtype=torch.float32).module
    with torch.no_grad():
        logits = hidden(mine) @ mine.output_weight().T
        wanted = theirs(torch.arange(3, 24)[None]).logits[0]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_a_model_can_be_rounded_after_training(tmp_path) -> None:
    config = tiny.config(tmp_path, trainer={"max_steps": 1})
    runs.train(config)
    export_model(choose(config.run_dir), tmp_path / "out", quantization="int4", group_size=32)
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(name.endswith("weight_packed") for name in names) == 14
    with pytest.raises(ModelError, match="group_size is 128, and these layers"):
        export_model(choose(config.run_dir), tmp_path / "other", quantization="int4")
    with pytest.raises(ModelError, match="it can be 32, 64, 128"):
        export_model(choose(config.run_dir), tmp_path / "o", quantization="int4", group_size=48)
    with pytest.raises(ModelError, match="Add --quantization int4"):
        export_model(choose(config.run_dir), tmp_path / "o", group_size=32)
