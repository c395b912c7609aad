"""The hidden states of a micro-batch, and the tokens to which they belong.

    Hidden       all tokens are here, perhaps those of equal prompts once for all copies
    PartHidden   train/sequence/hidden.py: some tokens are here, the others on other ranks

A reader gets the states (`at`) of the tokens that this rank holds (`mine`), and combines its
results (`whole`, `total`) into those of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from homeostat.arrays import IntArray
from homeostat.ops.branches import Branches
from homeostat.ops.sharing import SharedPrompts
from homeostat.train.reducers import Reducer, TokenPlaces

Send = Callable[[np.ndarray], Tensor]


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states after the final norm. `place_N` is the place of each token's state; None: the
    token's own place.

    `shared_N` says the same of the states of inner layers. `send` copies arrays to the device.
    """

    state_XD: Tensor
    send: Send
    place_N: Tensor | None = None
    shared_N: Tensor | None = None

    def mine(self, index_M: IntArray) -> IntArray:
        """Return the tokens whose states are on this rank: all of them."""
        return index_M

    def at(self, index_M: IntArray) -> Tensor:
        """Return the states of tokens that are here."""
        at_M = self.send(index_M)
        return self.state_XD[at_M if self.place_N is None else self.place_N[at_M]]

    def whole(self, values_M: Tensor, of_M: IntArray, among_M: IntArray) -> Tensor:
        """Return values of tokens `of_M`, which are all that there are, in the order `among_M`."""
        assert len(of_M) == len(among_M), (len(of_M), len(among_M))
        if np.array_equal(of_M, among_M):
            return values_M
        return values_M[self.send(np.argsort(of_M))]

    def total(self, value: Tensor) -> Tensor:
        """Return a sum over all tokens from one over those that are here."""
        return value

    def reduced(self, reduce: Reducer, state_XD: Tensor, places: TokenPlaces) -> Tensor:
        """Return what a reducer makes of the states of a layer."""
        return reduce(state_XD, places)

    def state_places(self, num_tokens: int) -> Tensor:
        """Return, for each token of the batch, where the states of inner layers have it."""
        if self.shared_N is not None:
            return self.shared_N
        return torch.arange(num_tokens, device=self.state_XD.device)


def of_all_tokens(state_XD: Tensor, send: Send, sharing: SharedPrompts | Branches | None) -> Hidden:
    """Return the states of a pass over all tokens; `sharing` computed equal prompts once."""
    if sharing is None:
        return Hidden(state_XD, send)
    place_N = sharing.place_N if isinstance(sharing, Branches) else None
    return Hidden(state_XD, send, place_N, shared_N=sharing.place_N)
