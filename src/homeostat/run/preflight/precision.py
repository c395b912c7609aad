"""Say what `check` finds out about layers in another precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from homeostat.config.fp8 import Fp8Config
from homeostat.config.int4 import Int4Config, environment_line
from homeostat.config.run import RunConfig
from homeostat.models.shape_only import shape_decoder
from homeostat.models.transformers_model import TransformersModel, meta_transformers
from homeostat.precision.fp8_model import fp8_choices, require_fp8
from homeostat.precision.int4_rewrite import int4_choices, int4_line
from homeostat.precision.layers import Choice
from homeostat.precision.recipe import Fp8Recipe
from homeostat.run.preflight.item import Item

_NAMES_SHOWN = 4


def precision_items(config: RunConfig, device: torch.device) -> Iterator[Item]:
    """Yield what is computed in FP8 or INT4, and where; raise ModelError for what cannot be."""
    fp8, int4 = config.trainer.fp8, config.trainer.int4
    if int4 is not None:
        yield _int4_item(int4, int4_choices(_empty_model(config), int4))
    elif said := environment_line(None):
        yield Item("precision", "ok", said)
    if fp8 is None:
        return
    recipe, choices = Fp8Recipe.of(fp8), fp8_choices(_empty_model(config), fp8)
    require_fp8(choices, recipe, device=device)
    yield _fp8_item(fp8, recipe, choices, device)


def _fp8_item(
    fp8: Fp8Config, recipe: Fp8Recipe, choices: list[Choice], device: torch.device
) -> Item:
    chosen = [choice.layer for choice in choices if not choice.why_skipped]
    skipped = _skipped(choices)
    sizes = {
        layer.name: shape
        for layer in chosen
        for shape in layer.shapes.values()
        if any(size % recipe.multiple for size in shape[-2:])
    }
    text = f"FP8 {recipe.describe(fp8)}; {len(chosen)} layers"
    text += _skipped_text(skipped)
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


def _int4_item(int4: Int4Config, choices: list[Choice]) -> Item:
    chosen, skipped = [c.layer for c in choices if not c.why_skipped], _skipped(choices)
    text = int4_line(int4, num_layers=len(chosen)) + _skipped_text(skipped)
    facts = {
        "int4_layers": len(chosen),
        "skipped_layers": len(skipped),
        "group_size": int4.group_size,
        "start_step": int4.start_step,
    }
    return Item("precision", "ok", text, facts)


def _skipped(choices: list[Choice]) -> list[Choice]:
    return [choice for choice in choices if choice.why_skipped]


def _skipped_text(skipped: list[Choice]) -> str:
    if not skipped:
        return ""
    names = ", ".join(f"{one.layer.name} ({one.why_skipped})" for one in skipped[:_NAMES_SHOWN])
    more = len(skipped) - _NAMES_SHOWN
    return f"; left as they are: {names}" + (f" and {more} others" if more > 0 else "")


def _empty_model(config: RunConfig) -> nn.Module:
    """Return the model on the meta device."""
    if config.model.implementation == "transformers":
        return TransformersModel(meta_transformers(Path(config.model.path)))
    how = {"dtype": torch.float32, "kernel": "sdpa", "gradient_checkpointing": False}
    has_head = config.head is not None
    return shape_decoder(config.model, config.lora, has_value_head=has_head, **how)
