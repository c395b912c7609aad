"""Adapters: what is trained, what is refused, and dropout that belongs to the token."""

import json

import pytest
import torch

from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.errors import ModelError
from homeostat.models.adapter_files import save_adapter
from homeostat.models.build import load_model
from homeostat.models.lora import adapter_state, merged_state
from homeostat.models.preview import preview_model
from homeostat.ops.attention import PackedLayout
from homeostat.ops.dropout import dropout_keys

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
LENGTHS = [4, 6, 4]
IDS = [10, 11, 12]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def load(folder, adapter, *, gradient_checkpointing=False, seed=0):
    return load_model(
        ModelConfig(path=str(folder), init="random"),
        adapter,
        dtype=torch.float32,
        device=CPU,
        seed=seed,
        gradient_checkpointing=gradient_checkpointing,
    )


def wake(module, seed=0):
    """B starts at zero, which would hide A, dropout and scaling."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in adapter_state(module):
            if "lora_B" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return module


def documents():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 61, (length,), generator=generator) for length in LENGTHS]


def hidden(module, order, *, step=1):
    rows = [documents()[index] for index in order]
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.tensor([IDS[index] for index in order]).repeat_interleave(torch.tensor(lengths))
    keys = dropout_keys(ids, positions, seed=5, step=step) if step else None
    layout = PackedLayout.of(lengths, CPU)
    out = module.hidden(torch.cat(rows), positions, layout, dropout_keys_N=keys)
    return dict(zip(order, out.split(lengths), strict=True))


def test_only_the_adapter_is_trained_and_it_starts_as_nothing(folder):
    plain = load(folder, None)
    adapted = load(folder, LoraConfig(rank=3, targets=("q_proj", "up_proj")))
    trainable = [n for n, p in adapted.module.named_parameters() if p.requires_grad]
    assert sorted(trainable) == sorted(name for name, _ in adapter_state(adapted.module))
    assert adapted.sheet.facts["lora_modules"] == 4
    assert adapted.sheet.num_trainable == 2 * 3 * ((32 + 32) + (32 + 40))
    assert adapted.sheet.num_params == plain.sheet.num_params + adapted.sheet.num_trainable
    torch.testing.assert_close(hidden(adapted.module, [0])[0], hidden(plain.module, [0])[0])


def test_all_linear_is_every_one_but_the_head(folder):
    loaded = load(folder, LoraConfig(rank=2, targets=("all-linear",)))
    names = {name.split(".")[-3] for name, _ in adapter_state(loaded.module)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("target", ["query", "lm_head", "embed_tokens", "q_norm"])
def test_a_target_that_matches_nothing_is_refused_with_the_known_names(folder, target):
    with pytest.raises(ModelError, match=r"lora\.targets.*Known are down_proj, gate_proj"):
        load(folder, LoraConfig(targets=("q_proj", target)))


def test_the_first_adapter_follows_the_seed(folder):
    first, again, other = (
        dict(adapter_state(load(folder, LoraConfig(rank=2), seed=seed).module))
        for seed in (1, 1, 2)
    )
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert first[name].abs().max() <= 1 / 32**0.5
    assert first[name].detach().std() == pytest.approx((1 / 3 / 32) ** 0.5, rel=0.25)


def test_dropout_does_not_depend_on_packing(folder):
    module = wake(load(folder, LoraConfig(rank=4, dropout=0.5)).module)
    with torch.no_grad():
        together = hidden(module, [0, 1, 2])
        for order in ([2, 0, 1], [1], [2, 1]):
            for index, rows in hidden(module, order).items():
                torch.testing.assert_close(rows, together[index], atol=1e-5, rtol=1e-5)
        next_step = hidden(module, [0], step=2)[0]
        evaluated = hidden(module, [0], step=None)[0]
    assert (next_step - together[0]).abs().max() > 0.01
    assert (evaluated - together[0]).abs().max() > 0.01


def test_dropout_averages_to_the_adapter_without_it(folder):
    module = wake(load(folder, LoraConfig(rank=4, alpha=0.4, dropout=0.3)).module)
    module.model.layers = module.model.layers[:1]
    layer = module.model.layers[0].mlp.down_proj
    x = torch.randn(1, 40, generator=torch.Generator().manual_seed(0)).expand(4000, 40)
    keys = dropout_keys(torch.zeros(4000).long(), torch.arange(4000), seed=0, step=0)
    with torch.no_grad(), module.dropout_keys.use(keys):
        mean = layer(x).mean(0)
    torch.testing.assert_close(mean, layer(x[:1])[0].detach(), atol=0.1, rtol=0.1)


def test_gradients_do_not_depend_on_checkpointing(folder):
    gradients = []
    for gradient_checkpointing in (False, True):
        adapter = LoraConfig(rank=4, dropout=0.5)
        loaded = load(folder, adapter, gradient_checkpointing=gradient_checkpointing)
        module = wake(loaded.module)
        out = torch.cat(list(hidden(module, [0, 1, 2]).values()))
        # An evaluation between forward and backward must not change what is recomputed.
        with torch.no_grad():
            hidden(module, [1], step=None)
        out.pow(2).sum().backward()
        gradients.append({n: p.grad for n, p in module.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-5)


def test_saved_adapters_come_back_exactly(folder, tmp_path):
    adapter = LoraConfig(rank=2, alpha=3.0, targets=("o_proj",))
    module = wake(load(folder, adapter).module)
    save_adapter(module, tmp_path / "adapter", adapter)
    again = load(folder, adapter.model_copy(update={"path": str(tmp_path / "adapter")}), seed=0)
    for (name, tensor), (_, other) in zip(
        adapter_state(module), adapter_state(again.module), strict=True
    ):
        assert torch.equal(tensor, other), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 3}, r"r=2.*lora\.rank"),
        ({"alpha": 4.0}, r"lora_alpha=3\.0.*lora\.alpha"),
        ({"targets": ("q_proj",)}, r"lora\.targets"),
        ({"targets": ("o_proj", "q_proj")}, r"lacks.*lora\.targets"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(folder, tmp_path, change, message):
    adapter = LoraConfig(rank=2, alpha=3.0, targets=("o_proj",))
    save_adapter(load(folder, adapter).module, tmp_path / "adapter", adapter)
    other = adapter.model_copy(update={"path": str(tmp_path / "adapter"), **change})
    with pytest.raises(ModelError, match=message):
        load(folder, other)
    # `check` says it too, without loading a weight.
    with pytest.raises(ModelError, match=message):
        preview_model(
            ModelConfig(path=str(folder), init="random"), other, dtype=torch.float32, device=CPU
        )


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_or_broken_adapter_file_names_the_setting(folder, tmp_path, file):
    adapter = LoraConfig(rank=2)
    save_adapter(load(folder, adapter).module, tmp_path / "adapter", adapter)
    broken = adapter.model_copy(update={"path": str(tmp_path / "adapter")})
    (tmp_path / "adapter" / file).write_bytes(b"{")
    with pytest.raises(ModelError, match=rf"lora\.path.*{file}"):
        load(folder, broken)
    (tmp_path / "adapter" / file).unlink()
    with pytest.raises(ModelError, match=rf"lora\.path.*{file}"):
        load(folder, broken)


def test_other_adapter_kinds_are_refused(folder, tmp_path):
    adapter = LoraConfig(rank=2)
    save_adapter(load(folder, adapter).module, tmp_path / "adapter", adapter)
    path = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(path.read_text())
    changes = ({"use_dora": True}, {"peft_type": "IA3"}, {"bias": "all"})
    for change in (*changes, {"init_lora_weights": "pissa"}):
        path.write_text(json.dumps({**settings, **change}))
        with pytest.raises(ModelError, match=r"lora\.path"):
            load(folder, adapter.model_copy(update={"path": str(tmp_path / "adapter")}))


def test_merging_keeps_names_and_adds_the_update(folder):
    adapter = LoraConfig(rank=2, alpha=3.0, targets=("q_proj",))
    module = wake(load(folder, adapter).module)
    plain = dict(load(folder, None).module.named_parameters())
    merged = dict(merged_state(module))
    assert merged.keys() == plain.keys()
    for name, tensor in merged.items():
        if "q_proj" not in name:
            assert torch.equal(tensor, plain[name])
            continue
        stem = module.get_submodule(name.removesuffix(".weight"))
        update = 1.5 * stem.lora_B.weight.double() @ stem.lora_A.weight.double()
        torch.testing.assert_close(
            tensor.double(), plain[name].double() + update, atol=1e-6, rtol=1e-6
        )
