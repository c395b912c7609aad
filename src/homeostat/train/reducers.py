"""Reducers by name: each reduces hidden states to a small result on the rank that computed them.

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
    """The places of a batch's trained tokens (`_M`) and rows (`_B`) among its packed tokens.

    `state_N` says where the state of each token is: copies of a token share one.
    """

    index_M: Tensor
    row_of_M: Tensor
    lengths_B: Tensor
    state_N: Tensor


Reducer = Callable[[Tensor, TokenPlaces], Tensor]


def mean_of_trained(state_ND: Tensor, places: TokenPlaces) -> Tensor:
    """[B, D]: the mean over the trained tokens of each row; 0 for a row without any. In fp32."""
    chosen_MD = state_ND[places.state_N[places.index_M]].float()
    zeros_BD = chosen_MD.new_zeros(len(places.lengths_B), state_ND.shape[1])
    sum_BD = zeros_BD.index_add(0, places.row_of_M, chosen_MD)
    count_B = torch.bincount(places.row_of_M, minlength=len(places.lengths_B))
    return sum_BD / count_B.clamp_min(1)[:, None]


def last_of_row(state_ND: Tensor, places: TokenPlaces) -> Tensor:
    """[B, D]: the state of the last token of each row. In fp32."""
    return state_ND[places.state_N[places.lengths_B.cumsum(0) - 1]].float()


def mean_of_row(state_ND: Tensor, places: TokenPlaces) -> Tensor:
    """[B, D]: the mean over all tokens of each row. In fp32."""
    rows = places.state_N.split(places.lengths_B.tolist())
    return torch.stack([state_ND[own_T].float().mean(0) for own_T in rows])


def concat_of_trained(state_ND: Tensor, places: TokenPlaces) -> Tensor:
    """[B, G * D]: the states of a row's G trained tokens side by side. In fp32.

    All rows must have the same number of trained tokens.
    """
    num_rows = len(places.lengths_B)
    count_B = torch.bincount(places.row_of_M, minlength=num_rows)
    assert bool((count_B == count_B[0]).all()), f"rows have {count_B.tolist()} trained tokens"
    chosen_MD = state_ND[places.state_N[places.index_M]].float()
    return chosen_MD.reshape(num_rows, -1)


REDUCERS: dict[str, Reducer] = {
    "mean_of_trained": mean_of_trained,
    "last_of_row": last_of_row,
    "mean_of_row": mean_of_row,
    "concat_of_trained": concat_of_trained,
}
