"""kto's baseline: prompts with the completions of other rows, and the KL that they estimate.

Within every `batch_rows` rows of the data set, each prompt gets the completion of the row before
it, and the first that of the last: as in TRL, so the estimates are the same. Partners do not change
during the run, so the reference scores them only once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from homeostat.arrays import FloatArray64, IntArray
from homeostat.config.parts import RowLearningSettings
from homeostat.data.inputs import RowSet
from homeostat.data.store import RowStore
from homeostat.types import TokenRow


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The mismatched rows of a set of rows.

    `partners` says whose completion the prompt of a row gets; `ref_logps` are the log-probs of
    these completions under the reference, by row, or None if it scores them in each step.
    """

    store: RowStore
    partners: Mapping[int, int]
    max_length: int
    ref_logps: Mapping[int, float] | None = None

    @classmethod
    def of(cls, rows: RowSet[RowStore], config: RowLearningSettings) -> Mismatched:
        found = partners(rows.ids, batch_rows=config.trainer.batch_rows)
        return cls(rows.rows, found, config.data.max_length)

    @property
    def ids(self) -> IntArray:
        return np.array(list(self.partners), dtype=np.int64)

    def rows(self, row_ids: Sequence[int] | IntArray) -> list[TokenRow]:
        """Return the prompts of these rows, each with its partner's completion."""
        store, max_length = self.store, self.max_length
        return [
            mismatched_row(store, int(row), self.partners[int(row)], max_length=max_length)
            for row in row_ids
        ]

    def known(self, row_ids: Sequence[int] | IntArray) -> FloatArray64:
        """Return the reference's log-probs of these rows, computed before the first step."""
        assert self.ref_logps is not None, "the reference scores in each step"
        return np.array([self.ref_logps[int(row)] for row in row_ids])


def partners(row_ids: IntArray, *, batch_rows: int) -> dict[int, int]:
    """Return, for each row, the row whose completion its prompt gets."""
    found: dict[int, int] = {}
    for start in range(0, len(row_ids), batch_rows):
        some = row_ids[start : start + batch_rows]
        found |= dict(zip(some.tolist(), np.roll(some, 1).tolist(), strict=True))
    # A last row that stands alone would be its own partner.
    if len(row_ids) % batch_rows == 1 and len(row_ids) > 1:
        found[int(row_ids[-1])] = int(row_ids[-2])
    return found


def mismatched_row(store: RowStore, row_id: int, partner: int, *, max_length: int) -> TokenRow:
    """Return the prompt of one row with the completion of another."""
    own, other = store[row_id], store[partner]
    cut, start = (int(np.flatnonzero(row.weights_T)[0]) for row in (own, other))
    untrained_T = np.zeros(cut, dtype=np.float32)
    tokens_T = np.concatenate([own.tokens_T[:cut], other.tokens_T[start:]])
    weights_T = np.concatenate([untrained_T, other.weights_T[start:]])
    return TokenRow(row_id, tokens_T[:max_length], weights_T[:max_length])


def baseline(policy_logps: FloatArray64, ref_logps: FloatArray64) -> float:
    """Return the estimate of KL(policy || reference), which is never below 0."""
    return max(0.0, float(np.mean(policy_logps - ref_logps)))
