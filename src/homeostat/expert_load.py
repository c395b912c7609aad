"""Values about a model's experts that trainer and controller exchange. Torch-free, as types.py.

Suffixes: `_L` layers with experts, `_E` experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """The share of the routers in the loss of an update, and the room of experts.

    `num_tokens` and `num_rows` are those of the whole update that count: tokens that are not the
    last of their row, and rows that have such tokens. `load_LE` is how many of these tokens each
    expert of each layer has, which `balancing` aux needs before the first pass. `capacity_factor`
    bounds the tokens that an expert takes in a pass.
    """

    balancing: str
    aux_coefficient: float
    z_coefficient: float
    capacity_factor: float | None
    num_tokens: int
    num_rows: int
    load_LE: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The load of a model's experts in an update, over all ranks.

    `load_LE` counts the tokens of each expert of each layer. `aux_loss` and `z_loss` are means over
    layers, before their coefficients. `num_dropped` counts the (token, slot) pairs, of those in the
    load, whose expert had no room. `bias_max` is the largest expert bias before the update.
    """

    load_LE: NDArray[np.float64]
    aux_loss: float
    z_loss: float
    num_dropped: float
    bias_max: float | None = None

    @classmethod
    def merged(cls, parts: Sequence[ExpertLoad]) -> ExpertLoad | None:
        """Combine the shares of several ranks in one update; None of a model without experts."""
        if not parts:
            return None
        return cls(
            load_LE=np.sum([part.load_LE for part in parts], axis=0),
            aux_loss=sum(part.aux_loss for part in parts),
            z_loss=sum(part.z_loss for part in parts),
            num_dropped=sum(part.num_dropped for part in parts),
            bias_max=max((p.bias_max for p in parts if p.bias_max is not None), default=None),
        )
