"""Invariants of a step, checked where its numbers pass by: nothing of this may ever be off.

mask          the tokens that the loss saw are the ones that the update gave it
round trip    the tokens that are trained are the ones that were sampled (RL)
first ratio   before anything is updated, the policy is the policy: the log-probs that an update
              starts from are those that scoring the same rows gives (RL)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from homeostat.observe.catalogue.info import MIN
from homeostat.observe.names import describe
from homeostat.run.learning.updates import StepRows
from homeostat.types import (
    FloatArray,
    IntArray,
    RolloutGroup,
    StepPlan,
    TokenRow,
    TrainBatch,
    UpdateReport,
)

# Rows of a step that are scored once more, before its first update.
NUM_SCORED = 4


def plan_probes(plan: StepPlan, report: UpdateReport) -> dict[str, float]:
    """Compare what the update's batches gave with what the trainer says it had."""
    given = {
        int(row_id): int(count)
        for batch in plan.micro_batches
        for row_id, count in zip(batch.row_ids_B, _trained_B(batch), strict=True)
    }
    had = {
        int(row_id): len(logp_M)
        for row_id, logp_M in zip(report.row_ids_B, report.row_logp, strict=True)
    }
    off = sum(abs(had.get(row, 0) - given.get(row, 0)) for row in given.keys() | had.keys())
    empty = sum(count == 0 for count in given.values())
    return {
        "probe/mask_difference": float(off),
        "data/rows_without_training": empty / len(given),
        **report.probes,
    }


def _trained_B(batch: TrainBatch) -> IntArray:
    starts_B = np.cumsum(batch.lengths_B) - batch.lengths_B
    return np.add.reduceat(batch.weights_N != 0, starts_B, dtype=np.int64)


def round_trip_bad(groups: Sequence[RolloutGroup], rows: StepRows, plan: StepPlan) -> float:
    """Rows of the update whose tokens are not those of their sample's prompt and completion."""
    sampled = [
        np.concatenate([group.prompt.tokens_T, sample.completion.tokens_T])
        for group in groups
        for sample in group.samples
    ]

    def is_good(row: TokenRow) -> bool:
        places_T = rows.places[row.row_id]
        is_own = places_T >= 0
        wanted = sampled[rows.sample_R[row.row_id]][places_T[is_own]]
        return len(row) == len(places_T) and np.array_equal(row.tokens_T[is_own], wanted)

    found = (row for batch in plan.micro_batches for row in batch.rows())
    # Rows of the truth, which nobody sampled, have numbers beyond those of the samples.
    return float(sum(not is_good(row) for row in found if row.row_id < len(rows.rows)))


def first_ratio_off(scored: Mapping[int, FloatArray], report: UpdateReport) -> float | None:
    """Largest distance of the ratio from 1; None where none of the rows was in the update."""
    own = dict(zip(report.row_ids_B.tolist(), report.row_logp, strict=True))
    gaps = [own[row] - logp_M for row, logp_M in scored.items() if row in own]
    if not gaps:
        return None
    return float(np.abs(np.expm1(np.concatenate(gaps).astype(np.float64))).max())


def worst(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the worst of each over several updates; NaN if one of them is."""
    names = dict.fromkeys(name for probes in found for name in probes)
    return {
        name: float(_worst_of(name)([probes[name] for probes in found if name in probes]))
        for name in names
    }


def _worst_of(name: str) -> Callable[[list[float]], float]:
    """Return the smallest of what the catalogue takes the smallest of, else the largest."""
    info = describe(name)
    return np.min if info is not None and info.reduce == MIN else np.max
