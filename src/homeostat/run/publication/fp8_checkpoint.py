"""Weights in the layout of an FP8 checkpoint, quantised while they are packed for another engine.

    (name, bf16) ... -> (name, e4m3), (name of the scales, fp32) ... -> Packer

The numbers are the trainer's own FP8 copies (precision/fp8.py). vLLM reads two layouts of them:

    blockwise             quant_method fp8: `weight_scale_inv` [O / 128, K / 128]
    rowwise, tensorwise   compressed-tensors by channels: `weight_scale` [O, 1]; a scale of the
                          tensor is repeated, because vLLM would quantise fused maps again otherwise

vLLM casts activations by blocks of 128, or by tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from homeostat.config.fp8 import Fp8Config
from homeostat.config.parts import PublicationSettings
from homeostat.config.run import RunConfig
from homeostat.errors import ModelError
from homeostat.models.hub_names import hub_tensors
from homeostat.ops.moe_shape import MoeShape
from homeostat.precision.fp8 import quantise
from homeostat.precision.fp8_model import fp8_choices, require_layers
from homeostat.precision.layers import Choice
from homeostat.precision.recipe import BLOCK, Fp8Recipe
from homeostat.sync.bucket import Bucket, Packer
from homeostat.train.empty_model import empty_model

# Linear layers that vLLM merges into one.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Gate and up of an expert that tokens are routed to, in both spellings of the hub.
_GATE_OR_UP = re.compile(r"(.*\.experts\.\d+)\.(?:gate_proj|up_proj|w1|w3)\.weight")


@dataclass(frozen=True, slots=True)
class Fp8Checkpoint:
    """The weights that are quantised, and how. `skipped` are the modules that stay as they are, by
    their names on the hub: routers too, which vLLM holds as linear maps."""

    recipe: Fp8Recipe
    names: frozenset[str]
    skipped: tuple[str, ...]

    @classmethod
    def of(
        cls, choices: Sequence[Choice], config: Fp8Config, *, moe: MoeShape | None
    ) -> Fp8Checkpoint:
        """Return the checkpoint of a model with these layers; raise ModelError if vLLM could not
        read it."""
        recipe = Fp8Recipe.of(config)
        chosen = {choice.layer.name: choice for choice in choices if not choice.why_skipped}
        names = frozenset(
            hub_name
            for choice in chosen.values()
            for part, weight in choice.layer.weights.items()
            for hub_name, _ in hub_tensors(moe, f"{choice.layer.name}.{part}", weight)
        )
        for name, choice in chosen.items():
            _require_readable(name, choice, chosen, recipe)
        layers = [c.layer for c in choices if c.why_skipped and c.layer.kind != "embedding"]
        kept = [_hub_name(layer.name, moe) for layer in layers]
        experts = [choice.layer.name for choice in choices if choice.layer.kind == "experts"]
        kept += [_hub_name(f"{name.removesuffix('experts')}gate", moe) for name in experts]
        return cls(recipe, names, tuple(kept))

    def packer(self, packer: Packer) -> Fp8Packer:
        """Return a packer that quantises weights before it packs them."""
        return Fp8Packer(packer, self)

    @property
    def settings(self) -> dict[str, Any]:
        """Return `quantization_config` of the checkpoint's config.json."""
        if self.recipe.scaling == "blockwise":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
                "modules_to_not_convert": list(self.skipped),
            }
        numbers = {"num_bits": 8, "type": "float", "symmetric": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "ignore": list(self.skipped),
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**numbers, "strategy": "channel", "dynamic": False},
                    "input_activations": {**numbers, "strategy": "token", "dynamic": True},
                }
            },
        }

    def tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the checkpoint, each weight before its scales."""
        # Experts' gate and up are one matrix in the trainer, and share the scale of a whole tensor.
        waiting: dict[str, tuple[str, Tensor]] = {}
        for name, tensor in weights:
            if name not in self.names:
                yield name, tensor
            elif self.recipe.scaling != "tensorwise" or (pair := _pair(name)) is None:
                yield from self._cast([(name, tensor.detach())])
            elif pair in waiting:
                yield from self._cast([waiting.pop(pair), (name, tensor.detach())])
            else:
                waiting[pair] = name, tensor.detach()
        assert not waiting, f"gate and up come together, but for {', '.join(waiting)}"

    def _cast(self, together: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights and their scales; several of them have the scale of all together."""
        largest = [weight.abs().amax() for _, weight in together] if len(together) > 1 else []
        how = {
            "block": self.recipe.weights,
            "power_of_two": self.recipe.power_of_two,
            "amax": torch.stack(largest).amax().reshape(1) if largest else None,
        }
        for name, tensor in together:
            found = quantise(tensor, **how)
            yield name, found.values
            if self.recipe.scaling == "blockwise":
                yield f"{name}_scale_inv", found.scales
            else:
                yield f"{name}_scale", found.scales.expand(len(tensor), 1).contiguous()


@dataclass(slots=True)
class Fp8Packer:
    """Packs weights as an FP8 checkpoint has them."""

    packer: Packer
    checkpoint: Fp8Checkpoint

    @torch.no_grad()
    def pack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        return self.packer.pack(self.checkpoint.tensors(weights))

    def close(self) -> None:
        self.packer.close()


def _pair(name: str) -> str | None:
    """Return what an expert's gate and up have in common; None for any other weight."""
    found = _GATE_OR_UP.fullmatch(name)
    return None if found is None else found[1]


def _hub_name(name: str, moe: MoeShape | None) -> str:
    """Return a module's name on the hub; a block of experts is beside its router."""
    block, _, last = name.rpartition(".")
    beside = f"{block}.gate" if last == "experts" else name
    ((found, _),) = hub_tensors(moe, f"{beside}.weight", torch.empty(0))
    found = found.removesuffix(".weight")
    return f"{found.rpartition('.')[0]}.experts" if last == "experts" else found


def _require_readable(
    name: str, choice: Choice, chosen: Mapping[str, Choice], recipe: Fp8Recipe
) -> None:
    prefix, _, last = name.rpartition(".")
    group = next((names for names in _FUSED if last in names), ())
    missing = [one for one in group if f"{prefix}.{one}" not in chosen]
    if missing:
        raise ModelError(
            f"trainer.fp8.skip_layers matches {prefix}.{missing[0]} but not {name}: vLLM computes "
            f"{', '.join(group)} as one matrix, which has one precision. Skip all of them, or "
            "none."
        )
    for shape in choice.layer.shapes.values():
        if group and recipe.scaling == "blockwise" and shape[-2] % BLOCK:
            raise ModelError(
                f"{name} is {shape[-2]} x {shape[-1]}: vLLM reads FP8 by blocks only if the sizes "
                f"of {', '.join(group)} are multiples of {BLOCK}. Set trainer.fp8.recipe=rowwise, "
                "or engine.type=native."
            )


def fp8_checkpoint(config: RunConfig | PublicationSettings) -> Fp8Checkpoint | None:
    """Return how weights are quantised at publication; None if they are sent as they are.

    The native engine is sent the weights themselves, and casts them by the trainer's function.
    """
    fp8 = config.engine_fp8
    if fp8 is None or config.engine.needs_native_decoder:
        return None
    model = empty_model(config)
    choices = fp8_choices(model, fp8)
    require_layers(choices, Fp8Recipe.of(fp8))
    return Fp8Checkpoint.of(choices, fp8, moe=getattr(model, "hub_experts", None))
