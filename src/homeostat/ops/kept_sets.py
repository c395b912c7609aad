"""The kept sets of a batch's tokens, as tensors: what each token was drawn from.

    column kept_ids (ragged, on the host) and the predicted tokens -> checked -> KeptSets

A token whose set is empty was drawn from the whole vocabulary. Sets are checked before anything is
computed with them: a set that lacks the token that was drawn from it belongs to another token.

Suffixes: `_M` predicted tokens, `_C` those with a kept set, `_P` pairs of a token and an id that it
kept, `_N` packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from homeostat.arrays import IntArray
from homeostat.columns import Ragged
from homeostat.errors import ReplayError


@dataclass(frozen=True, slots=True)
class KeptSets:
    """The kept sets of M tokens, end to end.

    `at_C` are the tokens that have one; the others kept the whole vocabulary, and are `at_W`: None
    if there are none. `ids_P[offsets_C[c] : offsets_C[c + 1]]` are the ids of token `at_C[c]`,
    ascending; `row_P` is c.
    """

    ids_P: Tensor
    offsets_C: Tensor
    row_P: Tensor
    at_C: Tensor
    at_W: Tensor | None

    @classmethod
    def of(
        cls,
        kept_N: Ragged,
        tokens_N: IntArray,
        index_M: IntArray,
        *,
        vocabulary: int,
        send: Callable[[np.ndarray], Tensor],
    ) -> KeptSets | None:
        """Return the sets of tokens `index_M` of a batch; None if none of them has one.

        Raises ReplayError for sets that cannot be what these tokens were drawn from.
        """
        size_M = kept_N.sizes_T[index_M]
        at_C = np.flatnonzero(size_M)
        if len(at_C) == 0:
            return None
        size_C = size_M[at_C]
        offsets_C = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(size_C)])
        row_P = np.repeat(np.arange(len(at_C)), size_C)
        starts_C = kept_N.offsets_T[index_M[at_C]]
        place_P = np.arange(offsets_C[-1]) + (starts_C - offsets_C[:-1])[row_P]
        ids_P = kept_N.values[place_P]
        _require_fit(ids_P, row_P, tokens_N[index_M[at_C]], vocabulary)
        at_W = np.flatnonzero(size_M == 0)
        return cls(
            ids_P=send(ids_P),
            offsets_C=send(offsets_C),
            row_P=send(row_P),
            at_C=send(at_C),
            at_W=send(at_W) if len(at_W) else None,
        )


def _require_fit(
    ids_P: np.ndarray, row_P: np.ndarray, tokens_C: np.ndarray, vocabulary: int
) -> None:
    why = ""
    if ids_P.min() < 0 or ids_P.max() >= vocabulary:
        odd = ids_P[(ids_P < 0) | (ids_P >= vocabulary)][0]
        why = f"id {odd} lies outside the model's vocabulary of {vocabulary}"
    else:
        is_drawn_C = np.bincount(row_P, ids_P == tokens_C[row_P], minlength=len(tokens_C))
        if (is_drawn_C != 1).any():
            token = tokens_C[np.flatnonzero(is_drawn_C != 1)[0]]
            why = f"token {token} is not in the set that it was drawn from"
    if why:
        raise ReplayError(
            f"kept_ids: {why}. The sets were recorded with another model, or damaged. Sample anew, "
            "or set rollout.top_p=1, rollout.min_p=0 and no rollout.top_k."
        )
