"""Say which layers of a model are quantised now, read from the layers themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from homeostat.precision.fp8_experts import Fp8Experts
from homeostat.precision.fp8_linear import Fp8Product
from homeostat.precision.fp8_model import Fp8Rewrite
from homeostat.precision.int4_rewrite import Int4Rewrite
from homeostat.precision.layers import ModelLayer
from homeostat.precision.rewrite import Rewrite

_ROUTER = re.compile(r"(?:^|[._])(?:router|gate)$")


def is_on(rewrite: Rewrite) -> bool:
    """Return whether a rewrite has begun."""
    if isinstance(rewrite, Fp8Rewrite):
        return rewrite.is_on
    return isinstance(rewrite, Int4Rewrite) and rewrite.is_active


def format_of(rewrite: Rewrite) -> str:
    """Return fp8 or int4."""
    return "fp8" if isinstance(rewrite, Fp8Rewrite) else "int4"


def quantised(rewrite: Rewrite) -> list[ModelLayer]:
    """Return the layers that compute in low precision now."""
    if isinstance(rewrite, Fp8Rewrite):
        kinds = (Fp8Product, Fp8Experts)
        return [one for one in rewrite.layers() if isinstance(one.module.product, kinds)]
    assert isinstance(rewrite, Int4Rewrite), rewrite
    return [layer for layer in rewrite.layers if layer.name in rewrite.copies]


def is_sensitive(layer: ModelLayer) -> bool:
    """Return whether a layer should keep its precision: a head, an embedding or a router."""
    return layer.kind in ("head", "embedding") or _ROUTER.search(layer.name) is not None


def begin_step(
    rewrites: Iterable[Rewrite], step: int, *, ends: tuple[int, int] | None = None
) -> None:
    """Tell rewrites of a step, and which decoder layers at both ends they leave out (FP8)."""
    for rewrite in rewrites:
        if ends is not None and isinstance(rewrite, Fp8Rewrite):
            rewrite.leave_out(*ends)
        rewrite.begin_step(step)


def account_of(rewrites: Sequence[Rewrite]) -> dict[str, Any]:
    """Return the fields of the event precision_switched; none if nothing is quantised."""
    rewrite = next((one for one in rewrites if is_on(one)), None)
    if rewrite is None:
        return {}
    layers = quantised(rewrite)
    return {
        "format": format_of(rewrite),
        "layers": len(layers),
        "sensitive": [layer.name for layer in layers if is_sensitive(layer)],
    }
