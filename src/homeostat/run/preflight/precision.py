"""Report what `check` finds about layers in another precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from homeostat.config.fp8 import Fp8Config
from homeostat.config.int4 import Int4Config, environment_line
from homeostat.config.run import RunConfig
from homeostat.precision.fp8_model import fp8_choices, require_fp8
from homeostat.precision.int4_rewrite import int4_choices, int4_line
from homeostat.precision.layers import Choice
from homeostat.precision.recipe import Fp8Recipe
from homeostat.run.preflight.item import Item
from homeostat.run.publication.fp8_checkpoint import fp8_checkpoint
from homeostat.train.empty_model import empty_model

_NAMES_SHOWN = 4


def precision_items(config: RunConfig, device: torch.device) -> Iterator[Item]:
    """Yield what is computed in FP8 or INT4, and where; raise ModelError for what cannot be."""
    fp8, int4 = config.trainer.fp8, config.trainer.int4
    if int4 is not None:
        yield _int4_item(int4, int4_choices(empty_model(config), int4))
    elif said := environment_line(None):
        yield Item("precision", "ok", said)
    if fp8 is not None:
        recipe, choices = Fp8Recipe.of(fp8), fp8_choices(empty_model(config), fp8)
        require_fp8(choices, recipe, device=device)
        yield _fp8_item(fp8, recipe, choices, device)
    if config.is_rl and config.engine_fp8 is not None:
        yield _engine_item(config, config.engine_fp8, device)


def _engine_item(config: RunConfig, fp8: Fp8Config, device: torch.device) -> Item:
    """Say whether engine and trainer compute alike."""
    checkpoint = fp8_checkpoint(config)
    if config.engine.needs_native_decoder:
        choices = fp8_choices(empty_model(config), fp8)
        require_fp8(choices, Fp8Recipe.of(fp8), device=device)
    facts = {"engine_recipe": fp8.recipe, "sent_in_fp8": checkpoint is not None}
    if config.trainer.fp8 is None:
        text = (
            "the engine is in FP8 and the trainer is not: their log-probs differ by the FP8 "
            "rounding (sampling/*). With trainer.fp8 both round in the same way"
        )
        return Item("precision", "warning", text, facts)
    text = f"engine and trainer multiply by the same {fp8.recipe} FP8 weights"
    if checkpoint is not None:
        text += f"; {config.engine.type} is sent {len(checkpoint.names)} of them with their scales"
    if config.trainer.fp8.recipe == "tensorwise":
        text += (
            ". Activations have a scale for each row when the engine decodes, and one for the "
            "whole tensor in the trainer"
        )
    return Item("precision", "ok", text, facts)


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
