"""Writes a model with INT4 weights, packed for vLLM and transformers (precision/int4_files.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from homeostat.config.int4 import Int4Config
from homeostat.models.build import Model
from homeostat.models.hub_names import hub_tensors
from homeostat.precision.int4_files import KEY, packed_tensors, quantization_config
from homeostat.precision.int4_rewrite import int4_choices


@dataclass(frozen=True, slots=True)
class Int4Export:
    """The packing of a model: weights that are packed, by their names in files, and layers that
    stay."""

    group_size: int
    names: frozenset[str]
    ignore: tuple[str, ...]

    @classmethod
    def of(cls, model: Model, config: Int4Config) -> Int4Export:
        """Choose the layers of a model. Raise ModelError if the groups do not fit them."""
        names: set[str] = set()
        ignore: list[str] = []
        for choice in int4_choices(model, config):
            layer = choice.layer
            for part, weight in layer.weights.items():
                # A linear map's parameter is its weight; each expert's matrix is one in files.
                of_layer = dict(hub_tensors(model.hub_experts, f"{layer.name}.{part}", weight))
                if not choice.why_skipped:
                    names |= of_layer.keys()
                elif layer.kind != "embedding":
                    ignore += [name.removesuffix(".weight") for name in of_layer]
        # Readers look for the output matrix also where it is tied to the embedding.
        ignore = [*dict.fromkeys((*ignore, "lm_head", *_routers(model)))]
        return cls(config.group_size, frozenset(names), tuple(ignore))

    def tensors(
        self, stream: Iterable[tuple[str, Tensor]], *, scale_dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Pack the weights of a stream under file names; scales in their dtype, or another."""
        how = {"names": self.names, "group_size": self.group_size, "scale_dtype": scale_dtype}
        return packed_tensors(stream, **how)

    def config(self, source_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json with the description of the weights."""
        entry = quantization_config(group_size=self.group_size, ignore=self.ignore)
        return {**source_config, KEY: entry}


def _routers(model: Model) -> list[str]:
    """Return the names of routers, which other libraries hold as linear maps."""
    base: nn.Module = model.causal_lm
    routers = [
        f"{name}.gate" for name, module in base.named_modules() if hasattr(module, "experts")
    ]
    shape, nothing = model.hub_experts, torch.empty(0)
    found = (hub_tensors(shape, f"{name}.weight", nothing) for name in routers)
    return [hub_name.removesuffix(".weight") for pairs in found for hub_name, _ in pairs]
