"""kto's baseline: prompts with the completions of other rows, and the KL that they estimate.

Within every `batch_rows` rows of the data set, each prompt gets the completion of the row before
it, and the first that of the last: as in TRL, so the estimates are the same. Rows with one prompt
(the two sides of a pair) are no partners, because KL is not to be measured on answers to the
prompt: their batch is turned further. Partners do not change during the run, so the reference
scores them only once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from homeostat.arrays import FloatArray64, IntArray
from homeostat.config.parts import RowLearningSettings
from homeostat.data.inputs import RowSet
from homeostat.data.store import RowStore
from homeostat.types import TokenRow

# How many rows before it are searched for the partner of a row whose batch has none.
_LOOK_BACK = 64


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
        prompts = _prompt_numbers(rows.rows, rows.ids)
        found = partners(rows.ids, prompts, batch_rows=config.trainer.batch_rows)
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


def partners(row_ids: IntArray, prompts: IntArray, *, batch_rows: int) -> dict[int, int]:
    """Return, for each row, the row whose completion its prompt gets.

    `prompts` has the number of each row's prompt.
    """
    places = np.arange(len(row_ids))
    for start in range(0, len(row_ids), batch_rows):
        some = slice(start, start + batch_rows)
        places[some] = np.roll(places[some], _shift(prompts[some]))
    # A batch of one pair, or a last row that stands alone, has partners in other batches.
    for place in np.flatnonzero(prompts[places] == prompts).tolist():
        before = range(place - 1, place - 1 - min(_LOOK_BACK, len(row_ids) - 1), -1)
        others = (other for other in before if prompts[other] != prompts[place])
        places[place] = next(others, place - 1 if places[place] == place else places[place])
    return dict(zip(row_ids.tolist(), row_ids[places].tolist(), strict=True))


def _shift(prompts_B: IntArray) -> int:
    """Return by how many rows a batch is turned, so that as few as possible meet their prompt."""
    fewest, found = len(prompts_B) + 1, 1
    for shift in range(1, len(prompts_B)):
        same = int(np.count_nonzero(np.roll(prompts_B, shift) == prompts_B))
        if same < fewest:
            fewest, found = same, shift
        if same == 0:
            break
    return found


def _prompt_numbers(store: RowStore, row_ids: IntArray) -> IntArray:
    """Return the number of each row's prompt. Equal prompts have one number."""
    numbers: dict[bytes, int] = {}
    found = []
    for row in (store[int(row_id)] for row_id in row_ids):
        prompt_T = row.tokens_T[: int(np.flatnonzero(row.weights_T)[0])]
        digest = hashlib.sha256(prompt_T.tobytes()).digest()
        found.append(numbers.setdefault(digest, len(numbers)))
    return np.array(found, dtype=np.int64)


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
