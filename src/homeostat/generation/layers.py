"""List the layers of a recipe, a run or a checkpoint with the precision that each has.

recipe, run   the model on the meta device, and what the recipe chooses for each layer
checkpoint    the headers of its safetensors files: nothing is loaded, whoever quantised it
"""

from __future__ import annotations

import struct
from pathlib import Path

import torch

from homeostat.config.loading.load import load_config
from homeostat.config.parts import TrainerSetup
from homeostat.errors import ConfigError, ModelError, Problem
from homeostat.generation.choice import saved_recipe
from homeostat.hub.resolve import resolve_names
from homeostat.json_text import parse_json
from homeostat.models import hf
from homeostat.models.build import config_origin, new_decoder, open_source, read_configs
from homeostat.models.families import decoder_config
from homeostat.models.transformers_model import TransformersModel, meta_transformers
from homeostat.precision.bases import base_choices, held_bytes
from homeostat.precision.fp8_model import fp8_choices
from homeostat.precision.int4_rewrite import int4_choices
from homeostat.precision.layers import Choice
from homeostat.precision.nf4 import BLOCK
from homeostat.precision.recipe import Fp8Recipe
from homeostat.precision.sheets import LayerSheet, sheets_of
from homeostat.precision.stored import Stored, stored_layers
from homeostat.train.runtime import device_of, resolve_dtype

# A header that is longer than this is no header.
_MAX_HEADER = 512 * 2**20


def list_layers(path: Path, overrides: list[str] | None) -> list[LayerSheet]:
    """Return the layers of what `path` names: a recipe, the folder of a run, or of a checkpoint."""
    if not path.is_dir():
        return recipe_layers(resolve_names(load_config(path, overrides), rows=False).for_trainer)
    if overrides:
        raise ConfigError([Problem("KEY=VALUE", "settings belong to a recipe, not to a folder.")])
    if not _is_run(path):
        return checkpoint_layers(path)
    return recipe_layers(resolve_names(saved_recipe(path), rows=False).for_trainer)


def _is_run(folder: Path) -> bool:
    return (folder / "events.jsonl").is_file() and (folder / "config.json").is_file()


def recipe_layers(config: TrainerSetup) -> list[LayerSheet]:
    """Return the layers of the policy as the recipe trains it."""
    model = _on_meta(config)
    if config.model.quantization is not None:
        return _base_layers(model, config)
    fp8, int4 = config.trainer.fp8, config.trainer.int4
    choices: list[Choice] = []
    format = scaling = ""
    if fp8 is not None:
        recipe = Fp8Recipe.of(fp8)
        choices, format, scaling = fp8_choices(model, fp8), "fp8", recipe.describe(fp8)
    elif int4 is not None:
        choices, format = int4_choices(model, int4), "int4"
        start = f", from step {int4.start_step}" if int4.start_step > 1 else ""
        scaling = f"groups of {int4.group_size}{start}"
    return sheets_of(model, choices, format=format, scaling=scaling)


def _base_layers(model: torch.nn.Module, config: TrainerSetup) -> list[LayerSheet]:
    """Return the layers of a frozen base that is held in few bits."""
    base, dtype = config.model, resolve_dtype(config.trainer, device_of(config))
    is_nf4, double = base.quantization == "nf4", base.double_quantization
    scaling = f"blocks of {BLOCK}" + ", scales quantised too" * double if is_nf4 else "rows"
    return sheets_of(
        model,
        base_choices(model),
        format=str(base.quantization),
        scaling=scaling,
        held_bytes=lambda layer: held_bytes(base, layer, dtype),
    )


def _on_meta(config: TrainerSetup) -> torch.nn.Module:
    dtype = resolve_dtype(config.trainer, device_of(config))
    source = open_source(config.model)
    if config.model.implementation == "transformers":
        assert isinstance(source, Path), "combinations asks for a folder"
        return TransformersModel(meta_transformers(source)).to(dtype)
    raw, _ = read_configs(source)
    with torch.device("meta"):
        shape = decoder_config(raw, origin=config_origin(source))
        return new_decoder(shape, {"kernel": "sdpa"}, has_value_head=False).to(dtype)


def checkpoint_layers(folder: Path) -> list[LayerSheet]:
    """Return the layers of a folder with safetensors files."""
    tensors: dict[str, Stored] = {}
    for file in hf.weight_files(folder):
        tensors |= read_header(file)
    return stored_layers(tensors, hf.read_config(folder))


def read_header(file: Path) -> dict[str, Stored]:
    """Return the tensors that a safetensors file holds, without reading one of them."""
    try:
        with open(file, "rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _MAX_HEADER:
                raise ValueError(f"its header would be {length} bytes long")
            found = parse_json(opened.read(length))
            return {
                str(name): Stored(str(about["dtype"]), tuple(map(int, about["shape"])))
                for name, about in found.items()
                if name != "__metadata__"
            }
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from None
    except (
        struct.error,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ModelError(f"{file} is no safetensors file, or is damaged: {error}.") from None
