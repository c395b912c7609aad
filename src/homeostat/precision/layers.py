"""The layers of a built model that may be held in low precision, and which are chosen.

    model -> layers_of -> choices (each layer, and why it stays as it is) -> a rewrite of the chosen

A layer is named as in a Hugging Face checkpoint (`model.layers.0.self_attn.q_proj`), without the
`.weight` of its parameter. The experts of a block are one layer with two stacked parameters.
Adapters are not listed: the map that an adapter is added to is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor, nn

from homeostat.errors import ModelError

Kind = Literal["linear", "experts", "head", "embedding"]
# Groups of layers that are measured together.
Group = Literal["attention", "mlp", "experts", "head"]
GROUPS: tuple[Group, ...] = ("attention", "mlp", "experts", "head")

# Patterns of layers that every recipe skips unless it says otherwise; a model may have neither.
DEFAULT_SKIPS = ("lm_head", "embed")

_STACKED = ("gate_up_proj", "down_proj")
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """A layer of a built model with matrices that could be held in low precision.

    `weights` are its parameters by their names within the module, each [outputs, inputs], or
    [experts, outputs, inputs]. `block` is the number of the decoder layer; None outside of them.
    """

    name: str
    module: nn.Module
    kind: Kind
    group: Group
    block: int | None
    weights: Mapping[str, nn.Parameter]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every matrix, by its name within the module."""
        return {name: tuple(weight.shape) for name, weight in self.weights.items()}


@dataclass(frozen=True, slots=True)
class Choice:
    """A layer, and the reason why it keeps its precision; empty if it is rewritten."""

    layer: ModelLayer
    why_skipped: str = ""


def layers_of(model: nn.Module) -> list[ModelLayer]:
    """Return the layers of a model in its own order; `model` has `causal_lm` and `output_weight`.

    A tied output matrix is the embedding's, so that it is listed once.
    """
    head = model.output_weight()
    base: nn.Module = model.causal_lm
    return [layer for name, module in _outermost(base) for layer in _layer(name, module, head)]


def choose(
    layers: Sequence[ModelLayer],
    *,
    skip: Sequence[str],
    skip_first: int = 0,
    skip_last: int = 0,
    setting: str,
) -> list[Choice]:
    """Decide for every layer whether it is rewritten. `setting` prefixes keys in errors.

    `skip` holds patterns over names, as `matches` reads them; `skip_first` and `skip_last` are
    numbers of decoder layers at the two ends of the model.
    """
    _require_effect(layers, skip, setting=setting)
    count = num_blocks(layers)
    if skip_first + skip_last >= count:
        raise ModelError(
            f"{setting}.skip_first={skip_first} and {setting}.skip_last={skip_last} leave none of "
            f"the model's {count} layers. Lower them."
        )
    ends = {*range(skip_first), *range(count - skip_last, count)}
    return [Choice(layer, _why_skipped(layer, skip, ends, setting)) for layer in layers]


def num_blocks(layers: Iterable[ModelLayer]) -> int:
    """Return the number of decoder layers of the model that has these layers."""
    return max((layer.block for layer in layers if layer.block is not None), default=-1) + 1


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern of a skip list covers a layer's name.

    A pattern with `*`, `?` or `[` is a glob over the whole name; one that begins with `re:` is a
    regular expression that is searched for. Any other text must be a run of whole words of the
    name, which dots and underscores separate: `embed` covers `model.embed_tokens`, and `layers.1`
    does not cover `model.layers.10.mlp`.
    """
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    if any(sign in pattern for sign in "*?["):
        return fnmatchcase(name, pattern)
    return re.search(rf"(?:^|[._]){re.escape(pattern)}(?:$|[._])", name) is not None


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one with this canonical name."""
    base: nn.Module = model.causal_lm
    parent, _, child = name.rpartition(".")
    setattr(base.get_submodule(parent), child, module)


def _outermost(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by name, without those inside a linear map: its adapters."""
    inside = ""
    for name, module in base.named_modules():
        if inside and name.startswith(inside):
            continue
        inside = f"{name}." if isinstance(module, nn.Linear) else ""
        yield name, module


def _layer(name: str, module: nn.Module, head: Tensor) -> Iterable[ModelLayer]:
    if isinstance(module, nn.Embedding):
        yield _found(name, module, "embedding", ("weight",))
    elif isinstance(module, nn.Linear):
        # Compare tensors, not names: a value head stands in the place of the output matrix.
        is_head = module.weight is head
        yield _found(name, module, "head" if is_head else "linear", ("weight",))
    elif all(_is_stack(getattr(module, part, None)) for part in _STACKED):
        yield _found(name, module, "experts", _STACKED)


def _is_stack(value: object) -> bool:
    return isinstance(value, nn.Parameter) and value.ndim == 3


def _found(name: str, module: nn.Module, kind: Kind, parts: Sequence[str]) -> ModelLayer:
    block = _BLOCK.search(f"{name}.")
    return ModelLayer(
        name=name,
        module=module,
        kind=kind,
        group=_group(name, kind),
        block=None if block is None else int(block[1]),
        weights={part: getattr(module, part) for part in parts},
    )


def _group(name: str, kind: Kind) -> Group:
    if kind in ("head", "embedding"):
        return "head"
    if kind == "experts" or "experts" in name:
        return "experts"
    return "attention" if "attn" in name or "attention" in name else "mlp"


def _why_skipped(layer: ModelLayer, skip: Sequence[str], ends: set[int], setting: str) -> str:
    found = next((pattern for pattern in skip if matches(layer.name, pattern)), None)
    if found is not None:
        return f"{setting}.skip_layers: {found}"
    return f"{setting}.skip_first or skip_last" if layer.block in ends else ""


def _require_effect(layers: Sequence[ModelLayer], skip: Sequence[str], *, setting: str) -> None:
    """Raise ModelError for a pattern that covers no layer: a typo would quantise what it names."""
    for pattern in skip:
        if pattern in DEFAULT_SKIPS:
            continue
        try:
            is_used = any(matches(layer.name, pattern) for layer in layers)
        except re.error as error:
            raise ModelError(
                f"{setting}.skip_layers: {pattern!r} is no regular expression: {error}."
            ) from None
        if not is_used:
            raise ModelError(
                f"{setting}.skip_layers: {pattern!r} covers no layer of this model. Its layers are "
                f"called, for example, {layers[0].name} and {layers[-1].name}."
            )
