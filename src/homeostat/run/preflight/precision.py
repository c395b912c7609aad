"""Say what `check` finds out about layers in another precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from homeostat.config.fp8 import Fp8Config
from homeostat.config.run import RunConfig
from homeostat.models.shape_only import shape_decoder
from homeostat.models.transformers_model import TransformersModel, meta_transformers
from homeostat.precision.fp8_model import fp8_choices, require_fp8
from homeostat.precision.layers import Choice
from homeostat.precision.recipe import Fp8Recipe
from homeostat.run.preflight.item import Item
from homeostat.train.build import head_of

_NAMES_SHOWN = 4


def precision_items(config: RunConfig, device: torch.device) -> Iterator[Item]:
    """Yield what is computed in FP8, and where; raise ModelError for what cannot be."""
    fp8 = config.trainer.fp8
    if fp8 is None:
        return
    recipe, choices = Fp8Recipe.of(fp8), fp8_choices(_empty_model(config), fp8)
    require_fp8(choices, recipe, device=device)
    yield _fp8_item(fp8, recipe, choices, device)


def _fp8_item(
    fp8: Fp8Config, recipe: Fp8Recipe, choices: list[Choice], device: torch.device
) -> Item:
    chosen = [choice.layer for choice in choices if not choice.why_skipped]
    skipped = [choice for choice in choices if choice.why_skipped]
    sizes = {
        layer.name: shape
        for layer in chosen
        for shape in layer.shapes.values()
        if any(size % recipe.multiple for size in shape[-2:])
    }
    text = f"FP8 {recipe.describe(fp8)}; {len(chosen)} layers"
    if skipped:
        names = ", ".join(f"{one.layer.name} ({one.why_skipped})" for one in skipped[:_NAMES_SHOWN])
        more = len(skipped) - _NAMES_SHOWN
        text += f"; left as they are: {names}" + (f" and {more} others" if more > 0 else "")
    if sizes:
        name, shape = next(iter(sizes.items()))
        text += (
            f"; {len(sizes)} layers are padded with zeros to multiples of {recipe.multiple} "
            f"({name} is {shape[-2]} x {shape[-1]})"
        )
    is_emulated = device.type != "cuda"
    if is_emulated:
        text += "; emulated on this CPU: for correctness only, slower than without"
    facts = {
        "fp8_layers": len(chosen),
        "skipped_layers": len(skipped),
        "padded_layers": len(sizes),
        "power_of_two_scales": recipe.power_of_two,
        "emulated": is_emulated,
    }
    return Item("precision", "warning" if is_emulated else "ok", text, facts)


def _empty_model(config: RunConfig) -> nn.Module:
    """Return the model on the meta device."""
    if config.model.implementation == "transformers":
        return TransformersModel(meta_transformers(Path(config.model.path)))
    how = {"dtype": torch.float32, "kernel": "sdpa", "gradient_checkpointing": False}
    has_head = head_of(config) is not None
    return shape_decoder(config.model, config.lora, has_value_head=has_head, **how)
