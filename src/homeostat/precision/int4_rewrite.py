"""A model whose linear maps and experts compute with weights rounded to INT4.

    Int4Rewrite   chosen layers; their products are exchanged at the first INT4 step
    weights_changed()   rounds the weights of all layers anew, once after every update

The parameters stay as they are, so that optimizer, checkpoints and names see the same model. Each
layer keeps a rounded copy of its weights in their dtype; micro-batches of an update share it. The
gradient of the rounded weight goes to the weight unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from homeostat.config.int4 import Int4Config, environment_line
from homeostat.config.moe import GroupedKernel
from homeostat.errors import ModelError
from homeostat.ops.experts import ExpertsProduct
from homeostat.ops.linear import Linear, LinearProduct, Numerics
from homeostat.precision.int4 import GROUP_SIZES, fake_quantise, fits, straight_through
from homeostat.precision.layers import Choice, ModelLayer, choose, layers_of

_SETTING = "trainer.int4"
_NAMES_SHOWN = 8


class RoundedWeights:
    """The rounded copies of a layer's weights, in the order of its parameters."""

    def __init__(self, layer: ModelLayer, *, group_size: int) -> None:
        self.group_size = group_size
        self.weights = tuple(layer.weights.values())
        self.rounded = tuple(fake_quantise(w, group_size=group_size) for w in self.weights)

    def refresh(self) -> None:
        """Round the weights anew, into the same memory."""
        for weight, rounded in zip(self.weights, self.rounded, strict=True):
            fake_quantise(weight, group_size=self.group_size, out=rounded)


class Int4Linear:
    """The product of a linear map by its rounded weight. Implements `ops.linear.LinearProduct`."""

    def __init__(self, plain: LinearProduct, copies: RoundedWeights) -> None:
        self.plain = plain
        self.copies = copies

    def __call__(self, x: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
        return self.plain(x, straight_through(weight_OK, self.copies.rounded[0]), bias_O)


class Int4Experts:
    """Experts with rounded matrices. Implements `ops.experts.ExpertsProduct`."""

    def __init__(self, plain: ExpertsProduct, copies: RoundedWeights) -> None:
        self.plain = plain
        self.copies = copies

    def __call__(
        self,
        x_ND: Tensor,
        ids_NK: Tensor,
        weights_NK: Tensor,
        gate_up_EJD: Tensor,
        down_EDI: Tensor,
        *,
        numerics: Numerics,
        kernel: GroupedKernel,
    ) -> Tensor:
        matrices = zip((gate_up_EJD, down_EDI), self.copies.rounded, strict=True)
        rounded = (straight_through(weight, copy) for weight, copy in matrices)
        return self.plain(x_ND, ids_NK, weights_NK, *rounded, numerics=numerics, kernel=kernel)


class Int4Rewrite:
    """The INT4 layers of a model. Implements `precision.rewrite.Rewrite`."""

    def __init__(self, model: nn.Module, config: Int4Config) -> None:
        self.config = config
        choices = int4_choices(model, config)
        self.layers = [choice.layer for choice in choices if not choice.why_skipped]
        self._plain = {layer.name: _product_of(layer) for layer in self.layers}
        self.copies: dict[str, RoundedWeights] = {}
        self.begin_step(1)

    @property
    def is_active(self) -> bool:
        """Return whether the model computes with rounded weights now."""
        return bool(self.copies)

    def begin_step(self, step: int) -> None:
        """Round weights from the first INT4 step on, and not before it."""
        if (step >= self.config.start_step) is self.is_active:
            return
        if self.is_active:
            self.copies = {}
            for layer in self.layers:
                _exchange(layer, self._plain[layer.name])
            return
        for layer in self.layers:
            copies = RoundedWeights(layer, group_size=self.config.group_size)
            self.copies[layer.name] = copies
            plain = self._plain[layer.name]
            made = Int4Experts if layer.kind == "experts" else Int4Linear
            _exchange(layer, made(plain, copies))

    def weights_changed(self) -> None:
        """Round the weights of all layers anew."""
        for copies in self.copies.values():
            copies.refresh()

    def end_update(self, *, applied: bool) -> None:
        """Nothing is recorded during an update."""

    def state(self) -> Mapping[str, Tensor]:
        """Return nothing: all follows from the step and the weights."""
        return {}

    def restored(self) -> None:
        """Nothing was restored beside the weights."""

    def computed_weights(self) -> dict[str, Tensor]:
        """Return the rounded weights by their parameters' names; empty before the first step."""
        return {
            f"{layer.name}.{part}": rounded
            for layer in self.layers
            if layer.name in self.copies
            for part, rounded in zip(layer.weights, self.copies[layer.name].rounded, strict=True)
        }

    def describe(self) -> str:
        """Return a line for the start of a run."""
        config = self.config
        when = "" if config.start_step == 1 else f" from step {config.start_step} on"
        line = f"INT4 weights in groups of {config.group_size} in {len(self.layers)} layers{when}"
        said = environment_line(config)
        return f"{line} ({said})" if said else line


def int4_choices(model: nn.Module, config: Int4Config) -> list[Choice]:
    """Decide for every layer whether it is rounded. Raise ModelError where one cannot be.

    Works on the meta device, so that a recipe can be checked before anything is loaded.
    """
    choices = choose(layers_of(model), skip=config.skip_layers, setting=_SETTING)
    choices = [_without_ends(choice) for choice in choices]
    chosen = [choice.layer for choice in choices if not choice.why_skipped]
    if not chosen:
        raise ModelError(
            f"{_SETTING}.skip_layers covers all layers of the model, so that nothing would be "
            f"rounded. Remove some of it, or remove {_SETTING}."
        )
    require_fit(chosen, group_size=config.group_size)
    return choices


def require_fit(layers: Sequence[ModelLayer], *, group_size: int) -> None:
    """Raise ModelError with all layers whose inputs are no whole number of groups."""
    widths = {layer.name: [shape[-1] for shape in layer.shapes.values()] for layer in layers}
    odd = {name: sizes for name, sizes in widths.items() if not _all_fit(sizes, group_size)}
    if not odd:
        return
    every = [size for sizes in widths.values() for size in sizes]
    able = [size for size in GROUP_SIZES if _all_fit(every, size)]
    advice = f"Set {_SETTING}.group_size={max(able)}" if able else "No group size fits all layers"
    shown = [f"{name} ({' and '.join(map(str, sizes))})" for name, sizes in odd.items()]
    more = f" and {len(shown) - _NAMES_SHOWN} more" if len(shown) > _NAMES_SHOWN else ""
    which = f" (sizes that fit all: {', '.join(map(str, able))})" if able else ""
    raise ModelError(
        f"{_SETTING}.group_size is {group_size}, and these layers' inputs are no multiple of it: "
        f"{', '.join(shown[:_NAMES_SHOWN])}{more}. {advice}{which}, or name them in "
        f"{_SETTING}.skip_layers."
    )


def _all_fit(widths: Sequence[int], group_size: int) -> bool:
    return all(fits(width, group_size) for width in widths)


def _without_ends(choice: Choice) -> Choice:
    """Leave out output matrix and embedding: log-probs and lookups read them as they are."""
    layer = choice.layer
    if choice.why_skipped or layer.kind in ("linear", "experts"):
        return choice
    return Choice(layer, "log-probs and embeddings are computed with the weights as they are")


def _product_of(layer: ModelLayer) -> Any:
    product = getattr(layer.module, "product", None)
    if product is None:
        raise ModelError(
            f"{_SETTING}: {layer.name} is no layer of the native decoder. Set "
            "model.implementation=native."
        )
    return product


def _exchange(layer: ModelLayer, product: LinearProduct | ExpertsProduct) -> None:
    cast(Linear, layer.module).product = cast(LinearProduct, product)
