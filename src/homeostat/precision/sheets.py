"""A table of layers with the precision that each really has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from homeostat.precision.layers import Choice, ModelLayer, layers_of


@dataclass(frozen=True, slots=True)
class LayerSheet:
    """One line of the table. `num_bytes`: the layer's parameters and scales as they are stored.

    `format` is empty if the layer is not quantised, and `why` says what keeps it so.
    """

    name: str
    kind: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    format: str = ""
    scaling: str = ""
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Total:
    """The layers of one group, or of all of them."""

    group: str
    layers: int
    quantised: int
    num_bytes: int


def totals(sheets: Sequence[LayerSheet]) -> list[Total]:
    """Return a line for each group, and one for all."""
    groups = list(dict.fromkeys(sheet.group for sheet in sheets))
    return [
        Total(
            group or "all",
            layers=sum(_in(sheet, group) for sheet in sheets),
            quantised=sum(_in(sheet, group) and bool(sheet.format) for sheet in sheets),
            num_bytes=sum(sheet.num_bytes for sheet in sheets if _in(sheet, group)),
        )
        for group in (*groups, "")
    ]


def _in(sheet: LayerSheet, group: str) -> bool:
    return not group or sheet.group == group


def sheets_of(
    model: nn.Module,
    choices: Iterable[Choice],
    *,
    format: str,
    scaling: str,
    held_bytes: Callable[[ModelLayer], int] | None = None,
) -> list[LayerSheet]:
    """Return the layers of a model, built or on the meta device, with what was chosen for them.

    `held_bytes` gives the size of a chosen layer that is held as codes alone.
    """
    why = {choice.layer.name: choice.why_skipped for choice in choices}
    found = []
    for layer in layers_of(model):
        weights = list(layer.weights.values())
        is_quantised = why.get(layer.name) == ""
        num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        if is_quantised and held_bytes is not None:
            num_bytes = held_bytes(layer)
        found.append(
            LayerSheet(
                name=layer.name,
                kind=layer.kind,
                group=layer.group,
                shape=tuple(weights[0].shape),
                dtype=str(weights[0].dtype).removeprefix("torch."),
                num_bytes=num_bytes,
                format=format if is_quantised else "",
                scaling=scaling if is_quantised else "",
                why=why.get(layer.name, ""),
            )
        )
    return found
