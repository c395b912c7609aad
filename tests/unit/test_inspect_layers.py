"""Layers are listed with the precision that they really have, whoever quantised them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support import tiny
from typer.testing import CliRunner

from homeostat.cli.verbs import app
from homeostat.errors import ConfigError, ModelError
from homeostat.generation.layers import list_layers, recipe_layers
from homeostat.precision.sheets import LayerSheet, totals

UP = "model.layers.0.mlp.up_proj.weight"
Q = "model.layers.0.self_attn.q_proj"


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


def by_name(sheets: list[LayerSheet]) -> dict[str, LayerSheet]:
    return {sheet.name: sheet for sheet in sheets}


def test_a_recipe_shows_what_it_chooses_for_each_layer(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, "trainer.fp8={recipe: blockwise, skip_first: 1}")
    found = by_name(recipe_layers(config.for_trainer))
    first, last = (found[f"model.layers.{number}.mlp.up_proj"] for number in (0, 1))
    assert (first.format, first.why) == ("", "trainer.fp8.skip_first or skip_last")
    assert (last.format, last.dtype, last.shape) == ("fp8", "float32", (64, 32))
    assert "blockwise e4m3" in last.scaling
    assert found["model.embed_tokens"].why == "trainer.fp8.skip_layers: embed"
    sums = {total.group: total for total in totals(list(found.values()))}
    assert (sums["mlp"].quantised, sums["mlp"].layers) == (3, 6)
    assert sums["all"].num_bytes == sum(sheet.num_bytes for sheet in found.values())


def test_int4_and_plain_recipes(tmp_path: Path) -> None:
    int4 = by_name(
        recipe_layers(tiny.config(tmp_path, "trainer.int4={group_size: 32}").for_trainer)
    )
    assert int4[Q].scaling == "groups of 32"
    plain = recipe_layers(tiny.config(tmp_path).for_trainer)
    assert {sheet.format for sheet in plain} == {""}


@pytest.mark.parametrize(("format", "bits"), [("nf4", 4.5), ("int8", 8 + 32 / 128)])
def test_a_base_that_is_held_in_few_bits(tmp_path: Path, format: str, bits: float) -> None:
    tiny.write_model(tmp_path / "model", hidden_size=128, intermediate_size=256, head_dim=32)
    settings = (f"model.quantization={format}", "lora={rank: 4}", "model.init=pretrained")
    found = by_name(recipe_layers(tiny.config(tmp_path, *settings).for_trainer))
    layer = found[Q]
    assert layer.format == format
    assert layer.num_bytes == pytest.approx(bits / 8 * 128 * 128, rel=0.02)
    assert "keep their precision" in found["model.embed_tokens"].why


def test_a_checkpoint_in_blocks_of_fp8(tmp_path: Path) -> None:
    tensors = {
        UP: torch.zeros(300, 256).to(torch.float8_e4m3fn),
        f"{UP}_scale_inv": torch.ones(3, 2),
        "model.layers.0.mlp.gate.weight": torch.zeros(8, 256, dtype=torch.bfloat16),
        "model.layers.0.mlp.down_proj.weight": torch.zeros(256, 300, dtype=torch.bfloat16),
        "model.layers.0.input_layernorm.weight": torch.ones(256),
        "lm_head.weight": torch.zeros(500, 256, dtype=torch.bfloat16),
    }
    left_out = ["lm_head", "model.layers.0.mlp.gate"]
    config = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": left_out,
    }
    found = by_name(list_layers(checkpoint(tmp_path, tensors, quantization_config=config), None))
    up = found["model.layers.0.mlp.up_proj"]
    assert (up.format, up.scaling, up.dtype) == ("f8_e4m3", "128 x 128 blocks", "f8_e4m3")
    assert up.num_bytes == 300 * 256 + 6 * 4
    assert found["lm_head"].why == "quantization_config.modules_to_not_convert: lm_head"
    assert found["model.layers.0.mlp.gate"].why.endswith("mlp.gate")
    assert "does not leave it out" in found["model.layers.0.mlp.down_proj"].why
    assert "model.layers.0.input_layernorm" not in found


def test_scales_are_read_from_their_shapes(tmp_path: Path) -> None:
    fp8 = torch.zeros(64, 128).to(torch.float8_e4m3fn)
    kinds = {
        "rows": torch.ones(64, 1),
        "tensor": torch.ones(()),
        "groups of 32": torch.ones(64, 4),
        "32 x 64 blocks": torch.ones(2, 2),
    }
    tensors = {}
    for number, scales in enumerate(kinds.values()):
        layer = f"m.{number}.q_proj.weight"
        tensors |= {layer: fp8.clone(), f"{layer}_scale": scales}
    tensors["m.9.q_proj.weight"] = fp8.clone()
    found = list_layers(checkpoint(tmp_path, tensors), None)
    assert [sheet.scaling for sheet in found] == [*kinds, "no scales"]


def test_packed_int4_and_bitsandbytes(tmp_path: Path) -> None:
    packed = {
        f"{Q}.weight_packed": torch.zeros(64, 16, dtype=torch.int32),
        f"{Q}.weight_scale": torch.ones(64, 4, dtype=torch.bfloat16),
        f"{Q}.weight_shape": torch.tensor([64, 128]),
    }
    weights = {"num_bits": 4, "type": "int", "group_size": 32}
    groups = {"group_0": {"weights": weights}}
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    folder = checkpoint(tmp_path / "packed", packed, quantization_config=config)
    (layer,) = list_layers(folder, None)
    assert (layer.format, layer.scaling) == ("int4 (compressed-tensors)", "groups of 32")
    assert layer.shape == (64, 128)
    state = torch.zeros(9, dtype=torch.uint8)
    nf4 = {
        UP: torch.zeros(4096, 1, dtype=torch.uint8),
        f"{UP}.absmax": torch.zeros(128, dtype=torch.uint8),
        f"{UP}.nested_absmax": torch.zeros(1),
        f"{UP}.quant_state.bitsandbytes__nf4": state,
    }
    (layer,) = list_layers(checkpoint(tmp_path / "bnb", nf4), None)
    assert layer.format == "nf4 (bitsandbytes)"
    assert layer.scaling == "blocks of 64, scales quantised too"


def test_a_damaged_file_and_settings_of_a_folder_are_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {"a.weight": torch.zeros(2, 2)})
    with pytest.raises(ConfigError, match="belong to a recipe"):
        list_layers(folder, ["trainer.lr=1"])
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match="no safetensors file, or is damaged"):
        list_layers(folder, None)


def test_the_verb_prints_a_table_and_json(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {UP: torch.zeros(8, 4)})
    shown = CliRunner().invoke(app, ["inspect", "--layers", str(folder)])
    assert shown.exit_code == 0, shown.output
    assert "0 of 1 layers quantised" in shown.output
    shown = CliRunner().invoke(app, ["inspect", "--layers", str(folder), "--format", "json"])
    assert json.loads(shown.stdout)["layers"][0]["shape"] == [8, 4]


def test_names_are_shown_whole_in_a_narrow_terminal(tmp_path: Path) -> None:
    name = "model.language_model.layers.10.block_sparse_moe.shared_expert.down_proj"
    folder = checkpoint(tmp_path, {f"{name}.weight": torch.zeros(8, 4)})
    shown = CliRunner().invoke(app, ["inspect", "--layers", str(folder)], env={"COLUMNS": "80"})
    assert name in shown.output
