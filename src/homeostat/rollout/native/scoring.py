"""Log-probs of given rows under the engine's weights: whole rows packed, no cache.

The forward and the log-prob function are the trainer's own. Tokens with a kept set are scored over
that.

Suffixes: `_N` packed tokens, `_M` tokens of weight > 0, `_T` tokens of one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from homeostat.arrays import FloatArray
from homeostat.columns import KEPT_IDS, Ragged
from homeostat.models.build import Model
from homeostat.ops.attention import PackedLayout
from homeostat.ops.kept_sets import KeptSets
from homeostat.ops.logprobs import token_logprobs
from homeostat.rollout.native.memory import to_device
from homeostat.types import TokenRow, TrainBatch


def score_rows(
    model: Model,
    rows: Sequence[TokenRow],
    *,
    temperature: float,
    max_tokens: int,
    chunk_bytes: int,
    device: torch.device,
) -> list[FloatArray]:
    """Return, per row, the log-prob of each token of weight > 0. A forward has at most `max_tokens`
    tokens; a longer row comes alone."""
    scored: list[FloatArray] = []
    for part in _parts(rows, max_tokens):
        batch = TrainBatch.of(part)
        index_M = np.flatnonzero(batch.weights_N > 0)
        tokens_N = to_device(batch.tokens_N, device)
        hidden_ND = model.hidden(
            tokens_N,
            to_device(batch.positions_N, device),
            PackedLayout.of(batch.lengths_B.tolist(), device),
        )
        at_M, weight_VD = to_device(index_M, device), model.output_weight()
        column = batch.columns.get(KEPT_IDS)
        kept = None
        if isinstance(column, Ragged):
            kept = KeptSets.of(
                column,
                batch.tokens_N,
                index_M,
                vocabulary=weight_VD.shape[0],
                send=lambda array: to_device(array, device),
            )
        logp_M = token_logprobs(
            hidden_ND[at_M - 1],
            weight_VD,
            tokens_N[at_M],
            temperature=temperature,
            chunk_bytes=chunk_bytes,
            numerics=model.numerics,
            kept=kept,
            soft_cap=model.logit_cap,
        )
        counts = np.searchsorted(index_M, np.cumsum(batch.lengths_B)[:-1])
        scored += np.split(logp_M.cpu().numpy(), counts)
    return scored


def _parts(rows: Sequence[TokenRow], max_tokens: int) -> Iterator[list[TokenRow]]:
    part: list[TokenRow] = []
    for row in rows:
        if part and sum(map(len, part)) + len(row) > max_tokens:
            yield part
            part = []
        part.append(row)
    if part:
        yield part
