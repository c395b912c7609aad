"""Reducers by name: each makes something small of hidden states on the rank that computed them.

Hidden states are [N, D] per layer, too much to send to another process, so a trainer gives back
only what a reducer returns. Each is a pure function on tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """The places of a batch's trained tokens (`_M`) and rows (`_B`) among its packed tokens."""

    index_M: Tensor
    row_of_M: Tensor
    lengths_B: Tensor


Reducer = Callable[[Tensor, TokenPlaces], Tensor]


def mean_of_trained(state_ND: Tensor, places: TokenPlaces) -> Tensor:
    """[B, D]: the mean over the trained tokens of each row; 0 for a row without any. In fp32."""
    chosen_MD = state_ND[places.index_M].float()
    zeros_BD = chosen_MD.new_zeros(len(places.lengths_B), state_ND.shape[1])
    sum_BD = zeros_BD.index_add(0, places.row_of_M, chosen_MD)
    count_B = torch.bincount(places.row_of_M, minlength=len(places.lengths_B))
    return sum_BD / count_B.clamp_min(1)[:, None]


def last_of_row(state_ND: Tensor, places: TokenPlaces) -> Tensor:
    """[B, D]: the state of the last token of each row. In fp32."""
    return state_ND[places.lengths_B.cumsum(0) - 1].float()


REDUCERS: dict[str, Reducer] = {
    "mean_of_trained": mean_of_trained,
    "last_of_row": last_of_row,
}
