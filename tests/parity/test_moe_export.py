"""A model with experts that transformers computes is exported under the hub's names."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.moe import MOE_FAMILIES
from tiny_models import random_model, save

from homeostat.config.model import ModelConfig
from homeostat.models.build import load_model
from homeostat.models.lora import merged_state


@pytest.mark.parametrize("implementation", ["transformers", "native"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_what_was_read_is_what_is_exported(
    family: str, implementation: str, tmp_path: Path
) -> None:
    folder = save(random_model(MOE_FAMILIES[family]), tmp_path)
    loaded = load_model(
        ModelConfig(path=str(folder), implementation=implementation),
        None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=0,
        gradient_checkpointing=False,
    )
    written = load_file(folder / "model.safetensors")
    exported = dict(merged_state(loaded.module))
    assert exported.keys() == written.keys()
    assert any(".experts.1." in name for name in exported)
    for name, tensor in written.items():
        assert torch.equal(exported[name], tensor), name
