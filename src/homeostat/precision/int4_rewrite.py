"""A model whose linear maps and experts compute with weights rounded to INT4.

    Int4Rewrite         exchanges the products of the chosen layers
    begin_step()        switches them to rounded weights at the first INT4 step
    weights_changed()   rounds the weights of all layers again, once after every update

The parameters stay as they are, so that optimizer, checkpoints and names see the same model. Each
layer keeps a rounded copy of its weights in their dtype; micro-batches of an update share it. The
gradient of the rounded weight goes to the weight unchanged.

From the first INT4 step on the copies keep their memory, also while they are switched off to
compare: steps that an engine has captured read them at these addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from homeostat.config.int4 import Int4Config, environment_line
from homeostat.config.moe import GroupedKernel
from homeostat.errors import ModelError
from homeostat.ops.experts import ExpertsProduct
from homeostat.ops.linear import LinearProduct, Numerics
from homeostat.precision.int4 import GROUP_SIZES, fake_quantise, fits, straight_through
from homeostat.precision.layers import Choice, ModelLayer, choose, layers_of

_SETTING = "trainer.int4"
_NAMES_SHOWN = 8
# Maps of the same inputs.
_NEIGHBOURS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class RoundedWeights:
    """The rounded copies of a layer's weights, in the order of its parameters, in given memory."""

    def __init__(self, layer: ModelLayer, room: tuple[Tensor, ...], *, group_size: int) -> None:
        self.group_size = group_size
        self.weights = tuple(layer.weights.values())
        self.rounded = room
        self.refresh()

    def refresh(self) -> None:
        """Round the weights again, into the same memory."""
        for weight, rounded in zip(self.weights, self.rounded, strict=True):
            fake_quantise(weight, group_size=self.group_size, out=rounded)


class Int4Linear:
    """The product of a linear map that may be rounded. Implements `ops.linear.LinearProduct`."""

    def __init__(self, plain: LinearProduct) -> None:
        self.plain = plain
        # None before the first INT4 step.
        self.copies: RoundedWeights | None = None
        self._now: LinearProduct = plain

    def switch(self, copies: RoundedWeights | None) -> None:
        """Multiply by rounded copies from now on, or by the weight itself."""
        self.copies = copies
        self._now = self.plain if copies is None else self._rounded

    def weight(self, own_OK: Tensor) -> Tensor:
        """Return the weight that the map multiplies by now, given its own."""
        return own_OK if self.copies is None else self.copies.rounded[0]

    def __call__(self, x: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
        return self._now(x, weight_OK, bias_O)

    def _rounded(self, x: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
        assert self.copies is not None, "switched on with its copies"
        return self.plain(x, straight_through(weight_OK, self.copies.rounded[0]), bias_O)


class Int4Experts:
    """Experts that may be rounded. Implements `ops.experts.ExpertsProduct`."""

    def __init__(self, plain: ExpertsProduct) -> None:
        self.plain = plain
        self.copies: RoundedWeights | None = None

    def switch(self, copies: RoundedWeights | None) -> None:
        """Multiply by rounded copies from now on, or by the weights themselves."""
        self.copies = copies

    def matrices(self, gate_up_EJD: Tensor, down_EDI: Tensor) -> tuple[Tensor, ...]:
        """Return the matrices to multiply by, with gradients that go to the weights."""
        if self.copies is None:
            return gate_up_EJD, down_EDI
        pairs = zip((gate_up_EJD, down_EDI), self.copies.rounded, strict=True)
        return tuple(straight_through(weight, rounded) for weight, rounded in pairs)

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
        matrices = self.matrices(gate_up_EJD, down_EDI)
        return self.plain(x_ND, ids_NK, weights_NK, *matrices, numerics=numerics, kernel=kernel)


def expert_matrices(experts: nn.Module) -> tuple[Tensor, ...]:
    """Return the matrices that a block of experts is computed with: rounded ones in INT4."""
    weights = cast(Tensor, experts.gate_up_proj), cast(Tensor, experts.down_proj)
    product = experts.product
    return product.matrices(*weights) if isinstance(product, Int4Experts) else weights


class Int4Rewrite:
    """The INT4 layers of a model. Implements `precision.rewrite.Rewrite`."""

    def __init__(self, model: nn.Module, config: Int4Config) -> None:
        self.config = config
        choices = int4_choices(model, config)
        self.layers = [choice.layer for choice in choices if not choice.why_skipped]
        self._products = [_exchanged(layer) for layer in self.layers]
        self.copies: dict[str, RoundedWeights] = {}
        self._room: dict[str, tuple[Tensor, ...]] = {}
        self.begin_step(1)

    @property
    def is_active(self) -> bool:
        """Return whether the model computes with rounded weights now."""
        return bool(self.copies)

    def begin_step(self, step: int) -> None:
        """Round weights from the first INT4 step on, and not before it."""
        is_wanted = step >= self.config.start_step
        if is_wanted is self.is_active:
            return
        size = self.config.group_size
        layers = self.layers if is_wanted else []
        if is_wanted and not self._room:
            self._room = _room(layers)
        self.copies = {
            layer.name: RoundedWeights(layer, self._room[layer.name], group_size=size)
            for layer in layers
        }
        for layer, product in zip(self.layers, self._products, strict=True):
            product.switch(self.copies.get(layer.name))

    def weights_changed(self) -> None:
        """Round the weights of all layers again."""
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
        return int4_line(self.config, num_layers=len(self.layers))


def int4_line(config: Int4Config, *, num_layers: int) -> str:
    """Describe the settings for people, and whether the environment asked for them."""
    when = "" if config.start_step == 1 else f" from step {config.start_step} on"
    line = f"INT4 weights in groups of {config.group_size} in {num_layers} layers{when}"
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


def int4_bytes(model: nn.Module, config: Int4Config) -> int:
    """Return the bytes of the rounded copies that a rewrite of the model will hold."""
    chosen = [choice.layer for choice in int4_choices(model, config) if not choice.why_skipped]
    return sum(weight.nbytes for layer in chosen for weight in layer.weights.values())


def require_fit(layers: Sequence[ModelLayer], *, group_size: int) -> None:
    """Raise ModelError with all layers whose inputs are no whole number of groups."""
    widths = {layer.name: [shape[-1] for shape in layer.shapes.values()] for layer in layers}
    odd = {name: sizes for name, sizes in widths.items() if not _all_fit(sizes, group_size)}
    if not odd:
        return
    able = fitting_sizes(layers)
    advice = f"Set {_SETTING}.group_size={max(able)}" if able else "No group size fits all layers"
    shown = [f"{name} ({' and '.join(map(str, sizes))})" for name, sizes in odd.items()]
    more = f" and {len(shown) - _NAMES_SHOWN} more" if len(shown) > _NAMES_SHOWN else ""
    which = f" (sizes that fit all: {', '.join(map(str, able))})" if able else ""
    raise ModelError(
        f"{_SETTING}.group_size is {group_size}, and these layers' inputs are no multiple of it: "
        f"{', '.join(shown[:_NAMES_SHOWN])}{more}. {advice}{which}, or name them in "
        f"{_SETTING}.skip_layers."
    )


def fitting_sizes(layers: Sequence[ModelLayer]) -> list[int]:
    """Return the group sizes that divide the inputs of all layers."""
    widths = [shape[-1] for layer in layers for shape in layer.shapes.values()]
    return [size for size in GROUP_SIZES if _all_fit(widths, size)]


def _room(layers: Sequence[ModelLayer]) -> dict[str, tuple[Tensor, ...]]:
    """Allocate the copies of layers, those of the same inputs side by side: one product can cover
    them then, as it does the weights themselves."""
    by_name, room = {layer.name: layer for layer in layers}, {}
    for layer in layers:
        if layer.name in room:
            continue
        parent, _, last = layer.name.rpartition(".")
        beside = next((names for names in _NEIGHBOURS if names[0] == last), (last,))
        found = [by_name.get(f"{parent}.{name}") for name in beside]
        members = [one for one in found if one is not None] if all(found) else [layer]
        if len(members) == 1:
            weights = layer.weights.values()
            room[layer.name] = tuple(torch.empty(w.shape, **_place(w)) for w in weights)
            continue
        parts = [one.weights["weight"] for one in members]
        whole = torch.empty(sum(len(w) for w in parts), parts[0].shape[1], **_place(parts[0]))
        pieces = whole.split([len(w) for w in parts])
        room |= {one.name: (piece,) for one, piece in zip(members, pieces, strict=True)}
    return room


def _place(weight: Tensor) -> dict[str, Any]:
    return {"dtype": weight.dtype, "device": weight.device}


def _all_fit(widths: Sequence[int], group_size: int) -> bool:
    return all(fits(width, group_size) for width in widths)


def _without_ends(choice: Choice) -> Choice:
    """Leave out output matrix and embedding: log-probs and lookups read them as they are."""
    layer = choice.layer
    if choice.why_skipped or layer.kind in ("linear", "experts"):
        return choice
    return Choice(layer, "log-probs and embeddings are computed with the weights as they are")


def _exchanged(layer: ModelLayer) -> Int4Linear | Int4Experts:
    """Put a product that may be rounded in the place of a layer's own."""
    plain = getattr(layer.module, "product", None)
    if plain is None:
        raise ModelError(
            f"{_SETTING}: {layer.name} is no layer of the native decoder. Set "
            "model.implementation=native."
        )
    product = Int4Experts(plain) if layer.kind == "experts" else Int4Linear(plain)
    layer.module.product = product
    return product
