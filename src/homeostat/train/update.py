"""Brings the results of an update from the device to the report.

    Accumulated ... (device) -> UpdateShare (host, one copy) -> merged over ranks -> UpdateReport

Shares are merged in rank order, so that every rank makes the same report of the same shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from homeostat.algorithms.terms import LossTerms
from homeostat.arrays import FloatArray, IntArray
from homeostat.expert_load import ExpertLoad
from homeostat.models.expert_load import NUM_SUMS
from homeostat.train.forward import TokenScores
from homeostat.types import Role, TrainBatch, UpdateReport


@dataclass(frozen=True, slots=True)
class Accumulated:
    """The record of a micro-batch, or a part of it, until its update is applied."""

    terms: LossTerms
    # Log-probs, or values, of the trained tokens.
    head_M: Tensor
    row_ids_B: IntArray
    num_trained_B: IntArray
    # Only the first part of each micro-batch is counted.
    is_first: bool
    # [L, E + NUM_SUMS] of the model's experts (models/expert_load.py); None where it has none.
    load: Tensor | None = None

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        scores: TokenScores,
        terms: LossTerms,
        *,
        load: Tensor | None = None,
        is_first: bool = True,
    ) -> Accumulated:
        starts_B = np.cumsum(batch.lengths_B) - batch.lengths_B
        return cls(
            terms=replace(terms, loss=terms.loss.detach()),
            head_M=scores.head_M.detach(),
            row_ids_B=batch.row_ids_B,
            num_trained_B=np.add.reduceat(batch.weights_N != 0, starts_B, dtype=np.int64),
            is_first=is_first,
            load=load,
        )


@dataclass(frozen=True, slots=True)
class UpdateShare:
    """One rank's share of an update. `grad_norm` is over the gradients that it holds."""

    loss: float
    grad_norm: float
    num_micro_batches: int
    row_ids_B: IntArray
    row_losses_B: FloatArray
    row_logp: tuple[FloatArray, ...]
    sums: Mapping[str, float]
    maxima: Mapping[str, float]
    load: ExpertLoad | None = None


def to_host(
    done: Sequence[Accumulated], grad_norm: Tensor, *, bias_max: Tensor | None = None
) -> UpdateShare:
    """Copy the results of an update to the host, in one copy. `bias_max`: largest expert bias."""
    sums, maxima = reduce_stats([part.terms for part in done]) if done else ({}, {})
    loss = total_loss(done) if done else torch.zeros_like(grad_norm)
    # Offloaded gradients have their norm in host memory.
    norm = grad_norm.to(loss.device)
    scalars = torch.stack([loss, norm, *sums.values(), *maxima.values()])
    row_losses = [part.terms.row_losses_B for part in done]
    load = _total_load(done, bias_max)
    flat_load = scalars[:0] if load is None else load.flatten()
    parts = [scalars, flat_load, *row_losses, *(part.head_M for part in done)]
    host = torch.cat([part.float() for part in parts]).cpu().numpy()
    num_rows = sum(len(losses_B) for losses_B in row_losses)
    ends = np.cumsum([len(scalars), len(flat_load), num_rows])
    scalars_host, load_host, row_losses_B, logp_host = np.split(host, ends)
    loss_host, norm_host, *stats = scalars_host.tolist()
    no_rows_B = np.zeros(0, dtype=np.int64)
    num_trained_B = np.concatenate([no_rows_B, *(part.num_trained_B for part in done)])
    return UpdateShare(
        loss=loss_host,
        grad_norm=norm_host,
        num_micro_batches=sum(part.is_first for part in done),
        row_ids_B=np.concatenate([no_rows_B, *(part.row_ids_B for part in done)]),
        row_losses_B=row_losses_B,
        row_logp=tuple(np.split(logp_host, np.cumsum(num_trained_B)))[:-1],
        sums=dict(zip(sums, stats, strict=False)),
        maxima=dict(zip(maxima, stats[len(sums) :], strict=True)),
        load=None if load is None else _expert_load(load_host.reshape(load.shape)),
    )


def _total_load(done: Sequence[Accumulated], bias_max: Tensor | None) -> Tensor | None:
    """The load of an update, with the largest expert bias, or NaN, as one more column."""
    loads = [part.load for part in done if part.load is not None]
    if not loads:
        return None
    total = torch.stack(loads).sum(dim=0)
    largest = total.new_full((), math.nan) if bias_max is None else bias_max.to(total)
    return torch.cat([total, largest.expand(len(total), 1)], dim=1)


def _expert_load(host: FloatArray) -> ExpertLoad:
    *load_E, aux_L, z_L, dropped_L, bias_L = host.T.astype(np.float64)
    assert len(host.T) == len(load_E) + NUM_SUMS + 1, host.shape
    return ExpertLoad(
        load_LE=np.stack(load_E, axis=1),
        aux_loss=float(aux_L.mean()),
        z_loss=float(z_L.mean()),
        num_dropped=float(dropped_L.sum()),
        bias_max=None if math.isnan(bias_L[0]) else float(bias_L[0]),
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a loss on some rows; see `LossTerms` for `sums` and `maxima`."""

    sums: Mapping[str, float]
    maxima: Mapping[str, float]

    @classmethod
    def of(cls, terms: Sequence[LossTerms]) -> Measured:
        """Reduce loss terms by one device-to-host copy. Without terms nothing was measured."""
        sums, maxima = reduce_stats(terms) if terms else ({}, {})
        values = [*sums.values(), *maxima.values()]
        host = torch.stack(values).float().tolist() if values else []
        found = dict(zip([*sums, *maxima], host, strict=True))
        return cls({name: found[name] for name in sums}, {name: found[name] for name in maxima})

    @classmethod
    def merged(cls, parts: Sequence[Measured]) -> Measured:
        """Combine the measurements of all ranks. A rank without rows measured nothing."""
        busy = [part for part in parts if part.sums or part.maxima]
        if not busy:
            return cls({}, {})
        return cls(
            {name: sum(part.sums[name] for part in busy) for name in busy[0].sums},
            {name: _largest([part.maxima[name] for part in busy]) for name in busy[0].maxima},
        )


def total_loss(done: Sequence[Accumulated]) -> Tensor:
    return torch.stack([part.terms.loss for part in done]).sum()


def merge(shares: Sequence[UpdateShare], *, grad_norm: float) -> UpdateShare:
    """Combine the shares of all ranks. A rank without rows measured nothing."""
    busy = [share for share in shares if share.num_micro_batches]
    assert busy, "apply needs at least one accumulate before it"
    return UpdateShare(
        loss=sum(share.loss for share in busy),
        grad_norm=grad_norm,
        num_micro_batches=sum(share.num_micro_batches for share in busy),
        row_ids_B=np.concatenate([share.row_ids_B for share in busy]),
        row_losses_B=np.concatenate([share.row_losses_B for share in busy]),
        row_logp=tuple(logp for share in busy for logp in share.row_logp),
        sums={name: sum(share.sums[name] for share in busy) for name in busy[0].sums},
        maxima={name: _largest([share.maxima[name] for share in busy]) for name in busy[0].maxima},
        load=ExpertLoad.merged([share.load for share in busy if share.load is not None]),
    )


def make_report(share: UpdateShare, *, role: Role, step: int, learning_rate: float) -> UpdateReport:
    return UpdateReport(
        role=role,
        step=step,
        applied=math.isfinite(share.loss) and math.isfinite(share.grad_norm),
        loss=share.loss,
        grad_norm=share.grad_norm,
        learning_rate=learning_rate,
        num_micro_batches=share.num_micro_batches,
        row_ids_B=share.row_ids_B,
        row_losses_B=share.row_losses_B,
        stats={**share.sums, **share.maxima},
        row_logp=share.row_logp,
        load=share.load,
    )


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


def _largest(values: Sequence[float]) -> float:
    """Return the largest value, or NaN if one of them is NaN, like torch's amax."""
    return float(np.max(values))
