"""Quantised bases: NF4 and 8 bits against numpy, and adapters over them."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from tests.support import runs, tiny

from homeostat.config.loading.load import build_config
from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.errors import ConfigError, ModelError
from homeostat.generation.choice import choose
from homeostat.generation.exporting import export_model
from homeostat.generation.loading import load_weights
from homeostat.models.adapter_files import save_adapter
from homeostat.models.build import load_model, num_bytes, num_params
from homeostat.models.hf import save_hf
from homeostat.models.lora import adapter_state, merged_state
from homeostat.models.preview import preview_model
from homeostat.ops.attention import PackedLayout
from homeostat.ops.held import HeldLinear, held_weights
from homeostat.precision import int8, nf4
from homeostat.precision.bases import base_rewrite
from homeostat.train.saving.shards import TensorReader

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


# ---- formats -----------------------------------------------------------------------------------


def numpy_nf4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, largest magnitudes and values, one block after the other, by distances to codes."""
    book, codes, sizes, found = np.array(nf4.CODES, np.float32), [], [], []
    flat = values.astype(np.float32).reshape(-1)
    for start in range(0, len(flat), 64):
        block = flat[start : start + 64]
        size = np.abs(block).max()
        scaled = block * (np.float32(1) / size) if size > 0 else np.zeros_like(block)
        middles = (book[:-1] + book[1:]) / np.float32(2)
        chosen = (scaled[:, None] > middles[None]).sum(1)
        codes.append(chosen)
        sizes.append(size)
        found.append(book[chosen] * size)
    return np.concatenate(codes), np.array(sizes, np.float32), np.concatenate(found)


@pytest.mark.parametrize("shape", [(6, 40), (3, 64), (5, 21)])
def test_nf4_has_the_bits_of_an_independent_form(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    # A block of zeros, one far larger than the rest, and subnormals.
    weight.view(-1)[:64] = 0.0
    weight.view(-1)[70] = 1e4
    weight.view(-1)[-3:] = 1e-40
    codes, sizes, values = numpy_nf4(weight.numpy())
    packed, absmax = nf4.quantise(weight)
    pairs = np.stack([packed.numpy() >> 4, packed.numpy() & 15], 1).reshape(-1)
    assert np.array_equal(pairs[: len(codes)], codes)
    assert np.array_equal(absmax.numpy(), sizes)
    found = nf4.dequantise(packed, absmax, shape=weight.shape, dtype=torch.float32)
    assert np.array_equal(found.numpy().reshape(-1), values)


def test_scales_of_blocks_come_back_near_from_8_bits() -> None:
    absmax = torch.rand(700, generator=torch.Generator().manual_seed(0)) + 0.5
    codes, sizes, mean = nf4.quantise_scales(absmax)
    book = nf4.dynamic_book(CPU)
    assert len(book.unique()) == 256
    assert (codes.dtype, len(sizes)) == (torch.uint8, 3)
    found = nf4.dequantise_scales(codes, sizes, mean)
    # Nearest codes of the difference from the mean: checked one by one.
    apart = (absmax - mean).double()
    whole = sizes.double().repeat_interleave(256)[:700]
    best = (book.double()[None] * whole[:, None] - apart[:, None]).abs().amin(1)
    assert torch.allclose((found.double() - absmax.double()).abs(), best, atol=1e-6)


def test_8_bits_round_to_the_nearest_of_a_row() -> None:
    weight = torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    weight[2] = 0.0
    codes, scales = int8.quantise(weight)
    wanted = weight.numpy()
    largest = np.abs(wanted).max(1)
    assert np.array_equal(scales.numpy(), largest / np.float32(127))
    assert np.array_equal(np.abs(codes.numpy()).max(1), [127, 127, 0, 127, 127])
    found = int8.dequantise(codes, scales, dtype=torch.float32).numpy()
    assert (np.abs(found - wanted) <= scales.numpy()[:, None] * 0.5001).all()


# ---- models ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with random weights."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(CONFIG))
    random = load_model(
        ModelConfig(path=str(tmp_path / "config"), init="random"), None, **place(torch.float32)
    ).module
    for name, parameter in random.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    save_hf(merged_state(random), tmp_path / "model", source_config=CONFIG)
    return tmp_path / "model"


def place(dtype):
    return {"dtype": dtype, "device": CPU, "seed": 0, "gradient_checkpointing": False}


def load(folder, adapter=None, *, dtype=torch.float32, **settings):
    model = ModelConfig(path=str(folder), **settings)
    return load_model(model, adapter, hold=base_rewrite(model), **place(dtype)).module


def hidden(module):
    tokens = torch.arange(12) % 61
    return module.hidden(tokens, torch.arange(12), PackedLayout.of([12], CPU))


def woken(module):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in adapter_state(module):
            if "magnitude" not in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return module


FORMATS = [
    {"quantization": "nf4"},
    {"quantization": "nf4", "double_quantization": True},
    {"quantization": "int8"},
]


@pytest.mark.parametrize("settings", FORMATS)
@pytest.mark.parametrize("dora", [False, True])
def test_a_quantised_base_computes_as_the_model_of_its_values(folder, settings, dora):
    """Values and the adapter's gradients are those over plain weights of the same values."""
    lora = LoraConfig(rank=4, targets=("q_proj", "up_proj", "down_proj"), dora=dora)
    held = woken(load(folder, lora, **settings))
    plain = woken(load(folder, lora))
    with torch.no_grad():
        for name, weight in held_weights(held).items():
            plain.get_submodule(name).weight.copy_(weight.tensor())
        for (_, own), (_, other) in zip(adapter_state(plain), adapter_state(held), strict=True):
            own.copy_(other)
    outputs = [hidden(held), hidden(plain)]
    assert torch.equal(*outputs)
    assert not torch.allclose(outputs[0], hidden(load(folder)), atol=1e-3)
    grads = []
    for module, out in zip((held, plain), outputs, strict=True):
        out.square().sum().backward()
        grads.append([tensor.grad for _, tensor in adapter_state(module)])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    trained = {name for name, parameter in held.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in adapter_state(held)}


@pytest.mark.parametrize(("settings", "most"), [*zip(FORMATS, (0.6, 0.55, 1.2), strict=True)])
def test_a_base_takes_the_bytes_that_its_format_has(folder, settings, most):
    module = load(folder, LoraConfig(rank=1, targets=("q_proj",)), **settings)
    held = held_weights(module)
    assert len(held) == 14
    values = sum(weight.numel() for weight in held.values())
    assert sum(p.nbytes for weight in held.values() for p in weight.parameters()) < most * values
    assert num_params(module) == num_params(load(folder, LoraConfig(rank=1, targets=("q_proj",))))
    assert num_bytes(module) < 0.5 * 4 * num_params(module)
    assert isinstance(module.get_submodule("model.layers.0.mlp.up_proj"), HeldLinear)


def test_nothing_of_a_base_is_kept_between_the_passes(folder):
    module = woken(load(folder, LoraConfig(rank=2), quantization="nf4"))
    shapes = {weight.shape for weight in held_weights(module).values()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        hidden(module)
    assert not [tensor.shape for tensor in kept if tensor.shape in shapes]


def test_names_and_values_of_the_whole_model(folder):
    module = woken(load(folder, LoraConfig(rank=2, targets=("q_proj",)), quantization="int8"))
    state = dict(merged_state(module))
    assert state.keys() == dict(merged_state(load(folder))).keys()
    q = module.get_submodule("model.layers.0.self_attn.q_proj")
    update = q.scaling * (q.lora_B.weight @ q.lora_A.weight)
    torch.testing.assert_close(state["model.layers.0.self_attn.q_proj.weight"], q.weight + update)
    up = module.get_submodule("model.layers.0.mlp.up_proj")
    assert torch.equal(state["model.layers.0.mlp.up_proj.weight"], up.weight)


@pytest.mark.parametrize("settings", FORMATS[1:])
def test_an_adapter_loads_in_peft_over_the_same_base(folder, tmp_path, settings):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    lora = LoraConfig(rank=4, targets=("all-linear",))
    module = woken(load(folder, lora, **settings))
    save_adapter(module, tmp_path / "adapter", lora, base=ModelConfig(path=str(folder)))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in held_weights(module).items():
            base.get_submodule(name).weight.copy_(weight.tensor())
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    logits = theirs(torch.arange(12)[None] % 61).logits[0]
    ours = hidden(module) @ module.output_weight().T
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)


RECIPE = {
    "name": "quantised",
    "algorithm": {"type": "sft"},
    "model": {"path": "model", "quantization": "nf4"},
    "data": {"train": [{"type": "text", "path": "rows.jsonl"}]},
}


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ([], "model.quantization"),
        (["model.implementation=transformers"], "model.quantization"),
        (["model.meta_init=false"], "model.meta_init"),
        (["trainer.fp8={}"], "trainer.fp8"),
        (["trainer.backend.offload_params=true"], "trainer.backend.offload_params"),
        (["trainer.backend={type: fsdp}", "lora.dora=true"], "lora.dora"),
        (["model.quantization=int8", "model.double_quantization=true"], "double_quantization"),
    ],
)
def test_what_a_quantised_base_cannot_do_is_refused_by_its_key(changes, setting):
    adapter = ["lora.rank=4"] if changes else []
    with pytest.raises(ConfigError, match=setting):
        build_config(copy.deepcopy(RECIPE), [*adapter, *changes], file=None)


@pytest.mark.parametrize(
    ("now", "way_out"),
    [
        ({}, "Set model.quantization=nf4, model.double_quantization=true"),
        ({"quantization": "int8"}, "Set model.quantization=nf4, model.double_quantization=true"),
        ({"quantization": "nf4"}, "Set model.double_quantization=true"),
    ],
)
def test_an_adapter_goes_on_over_a_base_in_the_bits_it_was_trained_over(
    folder, tmp_path, now, way_out
):
    held = {"quantization": "nf4", "double_quantization": True}
    trained, adapter = ModelConfig(path=str(folder), **held), LoraConfig(rank=2)
    how = {**place(torch.float32), "hold": base_rewrite(trained)}
    module = load_model(trained, adapter, **how).module
    save_adapter(module, tmp_path / "adapter", adapter, base=trained)
    going_on = adapter.model_copy(update={"path": str(tmp_path / "adapter")})
    assert_same(
        dict(adapter_state(load_model(trained, going_on, **how).module)),
        dict(adapter_state(module)),
    )
    other = ModelConfig(path=str(folder), **now)
    for build in (load_model, preview):
        with pytest.raises(
            ModelError, match=rf"lora\.path: .*held in nf4 with double.*{way_out}\."
        ):
            build(other, going_on, **{**place(torch.float32), "hold": base_rewrite(other)})


def preview(model, adapter, *, dtype, device, hold, **_):
    return preview_model(model, adapter, dtype=dtype, device=device, hold=hold)


# ---- what a run leaves behind --------------------------------------------------------------------


def weights_of(found, dtype=torch.float32):
    return dict(merged_state(load_weights(found, device=CPU, dtype=dtype).module))


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("settings", FORMATS)
def test_every_form_of_a_run_over_a_quantised_base_has_its_weights(tmp_path, settings):
    """A run in bf16 over files in fp32: codes and values are those of the base in bf16."""
    base = tmp_path / "base"
    tiny.write_model(base)
    random = ModelConfig(path=str(base), init="random")
    made = load_model(random, None, **place(torch.float32)).module
    config = json.loads((base / "config.json").read_text())
    save_hf(merged_state(made), base, source_config=config)
    adapter = {"rank": 2, "rslora": True, "export": "merged"}
    run = tiny.config(
        tmp_path,
        model={"path": str(base), "init": "pretrained", **settings},
        lora=adapter,
        trainer={"precision": "bf16", "max_steps": 1},
        checkpoint={"export": "final"},
    )
    runs.train(run)
    shutil.copytree(run.run_dir, tmp_path / "bare", ignore=shutil.ignore_patterns("hf"))
    runs.sign(tmp_path / "bare" / "checkpoints" / "step_00000001")
    bare = choose(tmp_path / "bare")
    state = TensorReader(bare.checkpoint.path, "model").whole()
    wanted = {}
    for name, tensor in merged_state(made):
        value = tensor.bfloat16()
        if "layers" in name and tensor.ndim == 2:
            value = held_value(value, settings).float()
            a, b = (state[name.replace("weight", f"lora_{x}.weight")].float() for x in "AB")
            value = value + b @ a * (32 / 2**0.5)
        wanted[name] = value.float() if "layers" in name and tensor.ndim == 2 else tensor
    assert_same(weights_of(bare), wanted)
    # The merged export of the run is not quantised again.
    merged = {name: tensor.bfloat16() for name, tensor in wanted.items()}
    assert_same(weights_of(choose(run.run_dir), torch.bfloat16), merged)
    (said, figure) = export_model(bare, tmp_path / "whole", dtype="bf16")
    assert_same(weights_of(choose(tmp_path / "whole"), torch.bfloat16), merged)
    assert f"quantised to {settings['quantization']}" in said
    apart = [(name, merged[name].float() - wanted[name]) for name in wanted if "proj" in name]
    plain = {n: held_value(t.bfloat16(), settings).float() for n, t in merged_state(made)}
    error = sum(float(d.square().sum()) for _, d in apart)
    update = sum(float((wanted[name] - plain[name]).square().sum()) for name, _ in apart)
    assert f"by {100 * (error / update) ** 0.5:.2g} % of the adapter's update" in figure
    # The adapter alone says how its base was held.
    export_model(bare, tmp_path / "adapter", adapter_only=True)
    alone = choose(tmp_path / "adapter")
    assert alone.model.quantization == settings["quantization"]
    assert_same(weights_of(alone), wanted)


def held_value(weight, settings):
    """The values of a matrix in bf16 that is held in few bits."""
    if weight.ndim != 2:
        return weight
    if settings["quantization"] == "int8":
        return int8.dequantise(*int8.quantise(weight), dtype=torch.bfloat16)
    packed, absmax = nf4.quantise(weight)
    if settings.get("double_quantization"):
        absmax = nf4.dequantise_scales(*nf4.quantise_scales(absmax))
    return nf4.dequantise(packed, absmax, shape=weight.shape, dtype=torch.bfloat16)
