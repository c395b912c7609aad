"""The sets that the tokens of a request were drawn from, if its distribution is cut.

    KeptIds(request) -> put(sets) after each burst -> column: of the completion's new tokens

The trainer computes log-probs over the same sets (ops/kept_sets.py), so a set is returned whole or
not at all: a set of more than `MAX_KEPT_IDS` ids ends the run with an error that names the setting
to change. A token that was drawn from the whole vocabulary has an empty set, which costs nothing.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from homeostat.columns import KEPT_IDS, Ragged
from homeostat.config.kept_ids import MAX_KEPT_IDS
from homeostat.errors import EngineError
from homeostat.rollout.engine import Request
from homeostat.types import Author


class KeptIds:
    """The sets of the tokens that a request has sampled so far."""

    def __init__(self, request: Request) -> None:
        self._request = request
        # Arrays that grow in place, because joining many small ones takes long when all requests
        # end at once.
        self._values = array("i")
        self._sizes = array("i")

    def put(self, values: NDArray[np.int32], sizes_T: NDArray[np.int32]) -> None:
        """Append the sets of the next tokens, as concatenated ids and the size of each set."""
        self._values.frombytes(values.data.cast("B"))
        self._sizes.frombytes(sizes_T.data.cast("B"))

    def require_bounded(self, largest: int) -> None:
        """Raise EngineError if a token was drawn from more ids than can be returned."""
        if largest > MAX_KEPT_IDS:
            raise EngineError(_too_large(self._request, largest))

    def column(self) -> Ragged:
        """Return the sets of all tokens that were put. No more can be put afterwards."""
        offsets_T = np.zeros(len(self._sizes) + 1, dtype=np.int64)
        np.cumsum(np.frombuffer(self._sizes, dtype=np.int32), out=offsets_T[1:])
        return Ragged(np.frombuffer(self._values, dtype=np.int32), offsets_T)


def why_not_resumable(request: Request) -> str | None:
    """Return why the sets of the tokens that a request begins with are not known."""
    sampled = (segment for segment in request.begun if segment.author is Author.ENGINE)
    if all(KEPT_IDS in segment.columns for segment in sampled if len(segment.tokens_T)):
        return None
    return "it asks for kept ids, and those of the tokens that it begins with are unknown"


def packed(ids_SBK: np.ndarray, sizes_BS: np.ndarray) -> np.ndarray:
    """Return the ids of sets end to end, row by row, of ids that are padded to one width and lie
    step by step. None has more ids than that."""
    num_steps, num_rows, width = ids_SBK.shape
    sizes_T = sizes_BS.reshape(-1).astype(np.int64)
    token_BS = np.arange(num_rows)[:, None] + num_rows * np.arange(num_steps)
    start_T = token_BS.reshape(-1) * width - (np.cumsum(sizes_T) - sizes_T)
    place_P = np.arange(sizes_T.sum()) + np.repeat(start_T, sizes_T)
    return ids_SBK.reshape(-1)[place_P]


def _too_large(request: Request, size: int) -> str:
    sampling = request.sampling
    return (
        f"request {request.id!r}: a token was drawn from {size:,} ids (rollout.top_p="
        f"{sampling.top_p:g}, rollout.min_p={sampling.min_p:g}), and at most {MAX_KEPT_IDS:,} can "
        f"be replayed in training. Set rollout.top_k to {MAX_KEPT_IDS} or less, which bounds the "
        "set, or lower rollout.top_p or rollout.temperature."
    )
