"""From what a trainer computed to the terms of a loss, by the loss's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import torch
from torch import Tensor

from homeostat.algorithms import sft
from homeostat.algorithms.policy import policy_loss
from homeostat.algorithms.terms import LossTerms, PolicyTokens
from homeostat.types import LossSpec

SFT = "sft"


class EntropyNeed(StrEnum):
    """What a loss wants to know of the distribution's entropy."""

    NONE = "none"
    VALUE = "value"
    GRAD = "grad"


def entropy_need(spec: LossSpec) -> EntropyNeed:
    if spec.name == SFT:
        return EntropyNeed.NONE
    bonus = float(spec.params.get("entropy_bonus", 0.0))
    return EntropyNeed.GRAD if bonus > 0 else EntropyNeed.VALUE


def loss_terms(
    logp_M: Tensor,
    entropy_M: Tensor | None,
    columns_M: Mapping[str, Tensor],
    *,
    row_of_M: Tensor,
    num_rows: int,
    spec: LossSpec,
) -> LossTerms:
    """`columns_M` holds the weights and what else the loss reads of the batch."""
    if spec.name == SFT:
        return sft.sft_loss(logp_M, columns_M["weights"], row_of_M, num_rows, spec)
    assert entropy_M is not None, "policy losses measure the entropy"
    tokens = PolicyTokens(
        trainer_logp_M=logp_M,
        entropy_M=entropy_M,
        weights_M=columns_M["weights"],
        row_of_M=row_of_M,
        num_rows=num_rows,
        advantage_M=columns_M["advantage"],
        old_logp_M=columns_M.get("old_logp"),
        ref_logp_M=columns_M.get("ref_logp"),
        engine_logp_M=columns_M.get("engine_logp"),
    )
    return policy_loss(tokens, spec)


def reduce_stats(
    all_terms: Sequence[LossTerms],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and maxima of what the micro-batches of an update measured, as device scalars."""
    first = all_terms[0]
    sums = {name: torch.stack([t.sums[name] for t in all_terms]).sum() for name in first.sums}
    maxima = {
        name: torch.stack([t.maxima[name] for t in all_terms]).amax() for name in first.maxima
    }
    return sums, maxima
