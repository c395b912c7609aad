"""Log-probs of given tokens, and of the likeliest tokens at each place.

Suffixes: `_T` tokens of one text, `_M` those that are predicted (all but the first), `_K` the
likeliest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from homeostat.arrays import IntArray
from homeostat.errors import DataError
from homeostat.models.build import Model
from homeostat.ops.attention import PackedLayout
from homeostat.ops.linear import linear
from homeostat.ops.logprobs import token_logprobs
from homeostat.rollout.checks import token_problem

# Places whose whole distributions are in memory at a time.
_ROWS = 64


@dataclass(frozen=True, slots=True)
class TokenScores:
    """For each token but the first: its log-prob, and the likeliest tokens with theirs."""

    logprobs: list[float]
    top: list[dict[int, float]]


@torch.no_grad()
def score_text(
    model: Model, tokens_T: IntArray, *, top: int, device: torch.device, chunk_bytes: int
) -> TokenScores:
    """Return the log-probs of a text at temperature 1, by the trainer's own function.

    Raises DataError for a token that the model does not have.
    """
    weight_VD = model.output_weight()
    if problem := token_problem(tokens_T, len(weight_VD)):
        raise DataError(f"the text cannot be scored: {problem}")
    tokens = torch.from_numpy(tokens_T).to(device)
    layout = PackedLayout.of([len(tokens_T)], device)
    hidden_TD = model.hidden(tokens, torch.arange(len(tokens_T), device=device), layout)
    hidden_MD, target_M = hidden_TD[:-1], tokens[1:]
    how = {"chunk_bytes": chunk_bytes, "numerics": model.numerics, "soft_cap": model.logit_cap}
    logprobs = token_logprobs(hidden_MD, weight_VD, target_M, **how).tolist()
    if top == 0:
        return TokenScores(logprobs, [{} for _ in logprobs])
    likeliest: list[dict[int, float]] = []
    for rows_MD in hidden_MD.split(_ROWS):
        # A soft cap keeps the order of logits.
        ids_MK = linear(rows_MD, weight_VD, numerics=model.numerics).topk(top, dim=-1).indices
        repeated = rows_MD.repeat_interleave(top, dim=0)
        logp_MK = token_logprobs(repeated, weight_VD, ids_MK.reshape(-1), **how).view(-1, top)
        for ids, values in zip(ids_MK.tolist(), logp_MK.tolist(), strict=True):
            likeliest.append(dict(zip(ids, values, strict=True)))
    for token, value, found in zip(target_M.tolist(), logprobs, likeliest, strict=True):
        # One number for one token: readers test for equality to see whether it was the likeliest.
        if token in found:
            found[token] = value
    return TokenScores(logprobs, likeliest)
