"""Experts where they cannot be: adapters on them, GGUF files with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from tests.parity.tiny_moe import saved_moe

from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.errors import ModelError
from homeostat.models.build import load_model
from homeostat.models.lora import lora_modules, merged_state
from homeostat.models.preview import preview_model

CPU = torch.device("cpu")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def load(folder: Path, targets: tuple[str, ...] | None, **settings: str):
    lora = LoraConfig(rank=2) if targets is None else LoraConfig(rank=2, targets=targets)
    return load_model(
        ModelConfig(path=str(folder), **settings),
        lora,
        dtype=torch.float32,
        device=CPU,
        seed=0,
        gradient_checkpointing=False,
    ).module


@pytest.mark.parametrize("targets", [None, ("all-linear",), ("q_proj", "up_proj"), ("w2",)])
@pytest.mark.parametrize("family", ["mixtral", "dots1"])
def test_an_adapter_on_experts_is_refused_with_the_targets_to_use(family, targets, tmp_path):
    saved_moe(family, tmp_path)
    with pytest.raises(ModelError) as refused:
        load(tmp_path, targets)
    said = str(refused.value)
    assert "model.layers." in said
    assert "mlp.experts.gate_up_proj" in said
    assert "lora.targets=[k_proj, o_proj, q_proj, v_proj]" in said
    assert ("shared_experts.gate_proj" in said) == (family == "dots1")
    lora = LoraConfig() if targets is None else LoraConfig(targets=targets)
    with pytest.raises(ModelError, match="cannot have an adapter"):
        preview_model(ModelConfig(path=str(tmp_path)), lora, dtype=torch.float32, device=CPU)


def test_transformers_models_with_experts_refuse_it_too(tmp_path):
    saved_moe("mixtral", tmp_path)
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj.*cannot have an adapter"):
        load(tmp_path, None, implementation="transformers")


def test_attention_and_shared_experts_can_be_adapted_and_merged(tmp_path):
    saved_moe("dots1", tmp_path)
    module = load(tmp_path, (*ATTENTION, "shared_experts.gate_proj", "shared_experts.down_proj"))
    names = [name for name, _ in lora_modules(module)]
    # Layers 1 and 2 have experts; the first one's MLP is dense, and was not asked for.
    assert len(names) == 3 * 4 + 2 * 2
    assert "model.layers.0.mlp.gate_proj" not in names
    assert "model.layers.1.mlp.shared_experts.gate_proj" in names
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert not [name for name in trained if ".mlp.gate." in name or ".experts." in name]
    with torch.no_grad():
        for _, adapted in lora_modules(module):
            adapted.lora_B.weight.normal_()
    merged = dict(merged_state(module))
    assert "model.layers.2.mlp.experts.7.down_proj.weight" in merged
    name = "model.layers.1.mlp.shared_experts.down_proj"
    adapted = module.get_submodule(name)
    update = adapted.lora_B.weight @ adapted.lora_A.weight * adapted.scaling
    torch.testing.assert_close(merged[f"{name}.weight"], (adapted.weight + update).detach())


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_a_gguf_file_with_experts_is_refused_with_the_reason(architecture, tmp_path):
    writer = GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_expert_count(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    model = ModelConfig(path=str(tmp_path / "model.gguf"))
    with pytest.raises(ModelError, match=r"8 experts.*HF checkpoints only"):
        preview_model(model, None, dtype=torch.float32, device=CPU)
