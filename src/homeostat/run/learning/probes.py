"""Check invariants of a step while its numbers are computed. All of them must hold in every step.

mask          the tokens that the loss saw are the ones that the update gave it
round trip    the tokens that are trained are the ones that were sampled (RL)
packing       a row has the same log-probs packed with others as it has alone
first ratio   before anything is updated, the policy is the policy: the log-probs that an update
              starts from are those that scoring the same rows gives (RL)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from homeostat.arrays import FloatArray, FloatArray64, IntArray
from homeostat.observe.catalogue.info import MIN
from homeostat.observe.names import describe
from homeostat.run.learning.updates import StepRows
from homeostat.types import (
    RolloutGroup,
    StepPlan,
    TokenRow,
    TrainBatch,
    UpdateReport,
)

# Rows of a step that are scored once more, before its first update.
NUM_SCORED = 4


def plan_probes(plan: StepPlan, report: UpdateReport) -> dict[str, float]:
    """Compare the contents of the update's batches with the trainer's report."""
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
    """Count rows of the update whose tokens differ from their sample's prompt and completion."""
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


@dataclass(frozen=True, slots=True)
class ScoredAgain:
    """Log-probs of rows before the update that trains on them: row -> those of trained tokens.

    `together` are rows that were scored in one batch, `alone` those that were not.
    """

    together: Mapping[int, FloatArray] = field(default_factory=dict)
    alone: Mapping[int, FloatArray] = field(default_factory=dict)

    def compared(self, report: UpdateReport) -> dict[str, float]:
        """Return how far the update's own log-probs are from these, by metric name."""
        found = {}
        if (gap_M := _differences(self.together, report)) is not None:
            found["probe/first_ratio_off"] = float(np.abs(np.expm1(gap_M)).max())
        if (gap_M := _differences(self.alone, report)) is not None:
            found["probe/packing_difference"] = float(np.abs(gap_M).max())
        return found


def _differences(scored: Mapping[int, FloatArray], report: UpdateReport) -> FloatArray64 | None:
    """Return the differences of all tokens; None where none of the rows was in the update.

    A row that was trained on other tokens than it was to be cannot be compared: that is what
    `probe/mask_difference` reports.
    """
    own = dict(zip(report.row_ids_B.tolist(), report.row_logp, strict=True))
    gaps = [
        own[row] - logp_M
        for row, logp_M in scored.items()
        if row in own and len(own[row]) == len(logp_M)
    ]
    return np.concatenate(gaps).astype(np.float64) if gaps else None


def last_packed(plan: StepPlan) -> TokenRow | None:
    """Return the last row of the fullest micro-batch: all others would leak into it.

    None if no row of the plan shares its micro-batch, or that row trains on nothing.
    """
    fullest = max(plan.micro_batches, key=lambda batch: batch.num_rows)
    if fullest.num_rows < 2:
        return None
    row = fullest.rows()[-1]
    return row if row.weights_T.any() else None


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
