"""Routes of a forward pass: the experts of its tokens, chosen freely, recorded, or replayed.

    Routing()                          every layer chooses
    Routing(records=True)              ... and what it chose can be read afterwards
    Routing(replayed_NLK, free_N)      recorded choices are repeated, except for tokens in `free_N`

Layers are numbered among those that have experts. A layer asks `experts` for its ids once in a
forward pass, and once more if the pass is recomputed for its gradient. Routing follows its tokens
where a pass reorders or selects them (`at`).

Suffixes: `_N` packed tokens, `_L` layers with experts, `_K` slots of a token, best expert first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from homeostat.models.expert_load import LoadWatch


@dataclass(slots=True)
class Routing:
    """The choices of one forward pass."""

    replayed_NLK: Tensor | None = None
    # Tokens that have no recorded choice: the last one of a row, which no engine ever ran.
    free_N: Tensor | None = None
    records: bool = False
    # Counts the load of experts and adds the routers' losses; None outside of training.
    load: LoadWatch | None = None
    _chosen: dict[int, Tensor] = field(default_factory=dict)

    def experts(self, layer: int, choose: Callable[[], Tensor]) -> Tensor:
        """Return int64 [N, K]: the experts of each token in a layer."""
        if self.replayed_NLK is None:
            ids_NK = choose()
        else:
            ids_NK = self.replayed_NLK[:, layer].long()
            if self.free_N is not None:
                ids_NK = torch.where(self.free_N[:, None], choose(), ids_NK)
        if self.records:
            self._chosen[layer] = ids_NK
        return ids_NK

    def at(self, index_M: Tensor) -> Routing:
        """Return the routing of tokens at these places. It keeps its own record."""
        replayed, free = self.replayed_NLK, self.free_N
        return Routing(
            None if replayed is None else replayed[index_M],
            None if free is None else free[index_M],
            self.records,
        )

    def take_record(self, other: Routing, index_N: Tensor) -> None:
        """Take over what `other` recorded: token n is its token index_N[n]."""
        self._chosen = {layer: ids_MK[index_N] for layer, ids_MK in other._chosen.items()}

    def recorded(self) -> Tensor:
        """Return int64 [N, L, K] of what all layers chose."""
        assert self._chosen, "nothing was recorded"
        return torch.stack([self._chosen[layer] for layer in range(len(self._chosen))], dim=1)


def smallest_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest integer type that holds the number of every expert."""
    return torch.uint8 if num_experts <= 256 else torch.int16
