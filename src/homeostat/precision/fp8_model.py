"""Rewrite a built model to FP8: the chosen linear maps and experts get another product.

Parameters keep their names, tensors and addresses, so that optimizer, checkpoints, publication and
the engine see the same model as before. Adapters stay as they are: the map below them is rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from homeostat.config.fp8 import Fp8Config
from homeostat.errors import ModelError
from homeostat.ops.linear import Linear
from homeostat.precision.fp8 import largest_of
from homeostat.precision.fp8_experts import Fp8Experts
from homeostat.precision.fp8_linear import Fp8Product, SharedInputs, Watch, WeightCopies
from homeostat.precision.history import AmaxHistory
from homeostat.precision.invariant import invariant_arithmetic_of, require_invariant
from homeostat.precision.layers import (
    Choice,
    ModelLayer,
    choose,
    layers_of,
    num_blocks,
    replace_module,
)
from homeostat.precision.operands import Arithmetic, arithmetic_of
from homeostat.precision.recipe import E4M3, E5M2, Fp8Recipe

SETTING = "trainer.fp8"


@dataclass(slots=True)
class _Rewritten:
    """A layer with its original product and its FP8 product."""

    layer: ModelLayer
    plain: Any
    fp8: Fp8Product | Fp8Experts


class Fp8Rewrite:
    """A model whose chosen layers compute in FP8 from `start_step` on. Implements `Rewrite`."""

    def __init__(
        self,
        layers: Sequence[_Rewritten],
        config: Fp8Config,
        recipe: Fp8Recipe,
        *,
        num_skipped: int,
        num_blocks: int,
    ) -> None:
        self._layers, self._config, self.recipe = layers, config, recipe
        # Decoder layers of the model: skip_layers may leave the last ones out of `layers`.
        self._num_skipped, self._num_blocks = num_skipped, num_blocks
        self._is_on = False
        self._ends = config.skip_first, config.skip_last
        self.begin_step(1)

    @property
    def is_on(self) -> bool:
        """Return whether the model computes in FP8 now."""
        return self._is_on

    def begin_step(self, step: int) -> None:
        """Compute in FP8 if the step is not before the first one in FP8."""
        is_on = step >= self._config.start_step
        if is_on == self._is_on:
            return
        self._is_on = is_on
        self._exchange()

    def leave_out(self, first: int, last: int) -> None:
        """Leave so many decoder layers at both ends as they are, from now on."""
        if (first, last) != self._ends:
            self._ends = first, last
            self._exchange()

    def _exchange(self) -> None:
        """Give every layer the product that it has now."""
        first, last = self._ends
        for one in self._layers:
            block = one.layer.block
            is_end = block is not None and not first <= block < self._num_blocks - last
            is_fp8 = self._is_on and not is_end
            one.layer.module.product = one.fp8 if is_fp8 else one.plain

    def weights_changed(self) -> None:
        """Make the FP8 copies of weights anew when they are needed next."""
        for one in self._layers:
            for copies in one.fp8.copies():
                copies.changed()

    def end_update(self, *, applied: bool) -> None:
        """Add the largest numbers of the update to the histories, or forget them."""
        for one in self._layers:
            for history in one.fp8.histories().values():
                history.end_update(applied=applied)

    def state(self) -> Mapping[str, Tensor]:
        """Return the histories of delayed scaling, by layer and tensor."""
        if not self.recipe.history:
            return {}
        return {
            f"{one.layer.name}.{kind}": history.values
            for one in self._layers
            for kind, history in one.fp8.histories().items()
        }

    def restored(self) -> None:
        """Go on from restored histories."""
        for one in self._layers:
            for history in one.fp8.histories().values():
                history.restored()

    def describe(self) -> str:
        """Return the recipe, and how many layers it applies to."""
        count = f"{len(self._layers)} layers, {self._num_skipped} left as they are"
        return f"FP8: {self.recipe.describe(self._config)}; {count}"

    def layers(self) -> list[ModelLayer]:
        """Return the layers that are rewritten."""
        return [one.layer for one in self._layers]

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Show every tensor that is quantised inside the block to `watch`, before it is."""
        for one in self._layers:
            one.fp8.watch = watch
        try:
            yield
        finally:
            for one in self._layers:
                one.fp8.watch = None


def rewrite_fp8(
    model: nn.Module,
    config: Fp8Config,
    *,
    device: torch.device,
    arithmetic: Arithmetic | None = None,
) -> Fp8Rewrite:
    """Rewrite the chosen layers of a model on its device; raise ModelError for what cannot be.

    `arithmetic` is that of the device, unless it is given.
    """
    recipe, choices = Fp8Recipe.of(config), fp8_choices(model, config)
    require_fp8(choices, recipe, device=device)
    shared = SharedInputs()
    if getattr(model, "numerics", "fast") == "invariant":
        require_invariant(recipe, setting=SETTING)
        _require_no_experts(choices)
        arithmetic = arithmetic or invariant_arithmetic_of(device)
    arithmetic = arithmetic or arithmetic_of(device)
    rewritten = [
        _rewritten(model, choice.layer, recipe, arithmetic, shared, device)
        for choice in choices
        if not choice.why_skipped
    ]
    counts = {
        "num_skipped": len(choices) - len(rewritten),
        "num_blocks": num_blocks([choice.layer for choice in choices]),
    }
    return Fp8Rewrite(rewritten, config, recipe, **counts)


def fp8_choices(model: nn.Module, config: Fp8Config) -> list[Choice]:
    """Return every layer, and why it is not computed in FP8."""
    ends = {"skip_first": config.skip_first, "skip_last": config.skip_last}
    return choose(layers_of(model), skip=config.skip_layers, setting=SETTING, **ends)


def require_fp8(choices: Sequence[Choice], recipe: Fp8Recipe, *, device: torch.device) -> None:
    """Raise ModelError that names every layer that cannot be computed in FP8, and the device."""
    reasons = device_obstacles(recipe, device=device)
    if reasons:
        raise ModelError(f"{SETTING}: " + " ".join(reasons + layer_obstacles(choices, recipe)))
    require_layers(choices, recipe)


def require_layers(choices: Sequence[Choice], recipe: Fp8Recipe) -> None:
    """Raise ModelError that names every layer that cannot be computed in FP8 on any device."""
    reasons = layer_obstacles(choices, recipe)
    if reasons:
        raise ModelError(f"{SETTING}: " + " ".join(reasons))


def layer_obstacles(choices: Sequence[Choice], recipe: Fp8Recipe) -> list[str]:
    """Return why layers that are not skipped cannot be computed in FP8, each with its name."""
    chosen = [choice.layer for choice in choices if not choice.why_skipped]
    found = [_outside(layer) for layer in chosen if layer.kind in ("head", "embedding")]
    found += [_foreign(layer) for layer in chosen if _is_foreign(layer)]
    experts = [layer for layer in chosen if layer.kind == "experts"]
    if experts and recipe.gradients == E5M2:
        found.append(
            f"{experts[0].name} and {len(experts) - 1} other layers of experts cannot have e5m2 "
            "gradients: the grouped products of FP8 take e4m3 only. Set "
            f"{SETTING}.format to e4m3 or bf16_gradients."
        )
    return found


def _require_no_experts(choices: Sequence[Choice]) -> None:
    """Raise ModelError for experts in FP8, whose grouped products have no invariant form."""
    for choice in choices:
        if choice.layer.kind == "experts" and not choice.why_skipped:
            raise ModelError(
                f"model.numerics is invariant, and {choice.layer.name} holds experts, whose FP8 "
                f"products depend on the batch. Add 'experts' to {SETTING}.skip_layers, or set "
                "model.numerics=fast."
            )


def fp8_bytes(model: nn.Module, config: Fp8Config, *, device: torch.device) -> int:
    """Return the bytes of the copies of weights that a rewrite of the model will hold."""
    recipe = Fp8Recipe.of(config)
    # An emulation keeps them dequantised, in fp32.
    each = 1 if device.type == "cuda" else 4
    num_copies = 1 if recipe.gradients is None else 2
    chosen = [choice.layer for choice in fp8_choices(model, config) if not choice.why_skipped]
    numbers = sum(weight.numel() for layer in chosen for weight in layer.weights.values())
    return numbers * each * num_copies


def device_obstacles(recipe: Fp8Recipe, *, device: torch.device) -> list[str]:
    """Return why a device cannot compute the recipe; a CPU emulates all of them."""
    if device.type != "cuda":
        return []
    capability = torch.cuda.get_device_capability(device)
    name = f"{torch.cuda.get_device_name(device)} (compute capability {_dotted(capability)})"
    if capability < (8, 9):
        return [f"{name} has no FP8 units, which begin with 8.9. Remove {SETTING}."]
    if recipe.scaling == "blockwise" and capability[0] != 9:
        return [
            f"{name} has no product of block-scaled FP8, which is Hopper's (9.0). Set "
            f"{SETTING}.recipe to rowwise or tensorwise."
        ]
    return []


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _outside(layer: ModelLayer) -> str:
    why = (
        "log-probabilities are computed from its matrix by a function of their own"
        if layer.kind == "head"
        else "its rows are looked up, and nothing is multiplied"
    )
    last = layer.name.rpartition(".")[2]
    word = {"head": "lm_head" if last == "lm_head" else last, "embedding": "embed"}[layer.kind]
    return f"{layer.name} cannot be computed in FP8: {why}. Add {word!r} to {SETTING}.skip_layers."


def _is_foreign(layer: ModelLayer) -> bool:
    """Return whether a layer of experts computes in code that is not ours."""
    return layer.kind == "experts" and not hasattr(layer.module, "product")


def _foreign(layer: ModelLayer) -> str:
    return (
        f"{layer.name} cannot be computed in FP8: transformers computes these experts. Set "
        f"model.implementation=native, or add {layer.name!r} to {SETTING}.skip_layers."
    )


def _rewritten(
    model: nn.Module,
    layer: ModelLayer,
    recipe: Fp8Recipe,
    arithmetic: Arithmetic,
    shared: SharedInputs,
    device: torch.device,
) -> _Rewritten:
    if layer.kind == "experts":
        fp8 = Fp8Experts(layer.name, recipe, device=device)
        return _Rewritten(layer, layer.module.product, fp8)
    if not isinstance(layer.module, Linear):
        layer = _ours(model, layer)
    gradients = recipe.gradients or E4M3
    fp8 = Fp8Product(
        name=layer.name,
        recipe=recipe,
        arithmetic=arithmetic,
        weights=WeightCopies(recipe, arithmetic),
        shared=shared,
        input_amax=AmaxHistory(recipe.history, limit=largest_of(E4M3), device=device),
        gradient_amax=AmaxHistory(recipe.history, limit=largest_of(gradients), device=device),
    )
    return _Rewritten(layer, layer.module.product, fp8)


def _ours(model: nn.Module, layer: ModelLayer) -> ModelLayer:
    """Put our linear map into the place of torch's; it takes over the parameters."""
    base = layer.module
    assert isinstance(base, nn.Linear), base
    sizes = base.in_features, base.out_features
    module = Linear(*sizes, bias=False, numerics="fast", device="meta")
    module.weight, module.bias = base.weight, base.bias
    replace_module(model, layer.name, module.train(base.training))
    kept = {"kind": layer.kind, "group": layer.group, "block": layer.block}
    return ModelLayer(name=layer.name, module=module, weights=layer.weights, **kept)
