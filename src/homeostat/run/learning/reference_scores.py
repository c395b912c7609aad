"""Score rows under the reference, once, and keep the result in the run folder.

    reference/<key>/logp.npy   a number per token of the rows, or per mismatched row
    reference/<key>/meta.json  its checksum

The key is a digest of the weights that scored, of the precision, of the rows, and of which of them
were scored: a resumed run finds the file and computes nothing, and a changed model, precision or
dataset never gets outdated scores. A file with a wrong checksum is computed again. A checkpoint
holds a digest of the weights that scored, so that a run is not resumed against another reference.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from homeostat.arrays import FloatArray, FloatArray64, IntArray
from homeostat.config.rollout import InitialReference
from homeostat.data.inputs import RowSet
from homeostat.data.loader import eval_batches, micro_batches
from homeostat.data.store import RowStore
from homeostat.errors import CheckpointError
from homeostat.json_text import parse_json
from homeostat.observe.durable import sync_folder, write_atomically
from homeostat.run.learning.attempts import Attempts
from homeostat.run.learning.mismatched import Mismatched
from homeostat.run.learning.precision import low_precision
from homeostat.run.session.session import Session
from homeostat.run.session.waiting import progress_of
from homeostat.train.forward import predicted_positions
from homeostat.train.saving.run_state import RunState
from homeostat.train.scoring import score
from homeostat.train.trainer import Trainer
from homeostat.types import Role, TokenRow, TrainBatch

Scores = FloatArray | FloatArray64

FORMAT = 1
# Rows that are scored in one go.
ROWS_AT_ONCE = 512

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReferenceScores:
    """Scores rows before the first step, or finds their scores in the run folder.

    `role` is the reference, or the policy that the run starts from if that is the reference.
    """

    attempts: Attempts
    session: Session
    role: Role
    checksums: Mapping[str, int]

    @classmethod
    def open(cls, attempts: Attempts, session: Session) -> ReferenceScores:
        is_policy = isinstance(attempts.config.used_reference, InitialReference)
        role = Role.POLICY if is_policy else Role.REFERENCE
        checksums = attempts.trainer.checksums(role)
        _require_same_reference(attempts.state, checksums)
        return cls(attempts, session, role, checksums)

    def of_rows(self, rows: RowSet[RowStore]) -> RowSet[RowStore]:
        """Return the rows with the column `ref_logp`."""
        logp_N = self._kept("rows", rows.rows.fingerprint, rows.ids, lambda: self._score(rows))
        return replace(rows, rows=rows.rows.with_columns({"ref_logp": logp_N}))

    def of_mismatched(self, mismatched: Mismatched) -> Mismatched:
        """Return the mismatched rows with the log-probs of their completions."""
        ids = mismatched.ids
        paired = np.concatenate([ids, np.array(list(mismatched.partners.values()))])
        what = f"mismatched {mismatched.max_length}"

        def compute() -> FloatArray64:
            return completion_logps(mismatched.rows(ids), self.role, self.attempts)

        logps = self._kept(what, mismatched.store.fingerprint, paired, compute)
        return replace(mismatched, ref_logps=dict(zip(ids.tolist(), logps.tolist(), strict=True)))

    def finish(self) -> None:
        """Free the reference, which is no longer needed."""
        if self.role is Role.REFERENCE:
            self.attempts.trainer.release(Role.REFERENCE)

    def _kept(
        self, what: str, fingerprint: str, ids: IntArray, compute: Callable[[], Scores]
    ) -> Scores:
        key = score_key(
            what,
            checksums=self.checksums,
            precision=self._precision(),
            fingerprint=fingerprint,
            row_ids=ids,
        )
        found, is_new = kept_scores(self.session.run_dir.path / "reference" / key, compute)
        self.session.event(
            "reference_scored", self.session.start_step, what=what, rows=len(ids), is_new=is_new
        )
        return found

    def _precision(self) -> str:
        """Name what the scores are computed in, by all settings that decide it."""
        dtype, low = (
            self.attempts.trainer.runtime.dtype,
            low_precision(self.attempts.config.trainer),
        )
        return str(dtype) if low is None else f"{dtype} {type(low).__name__} {low!r}"

    def _score(self, rows: RowSet[RowStore]) -> FloatArray:
        """Return the log-prob of every token of the store; NaN where it was not scored."""
        trainer, store = self.attempts.trainer, rows.rows
        logp_N = np.full(store.num_tokens, np.nan, dtype=np.float32)
        at_once = ROWS_AT_ONCE - ROWS_AT_ONCE % rows.rows_per_example
        with progress_of("scoring rows under the reference", self.session.console) as progress:
            for start in range(0, len(rows.ids), at_once):
                ids = rows.ids[start : start + at_once]
                batches, found = self.attempts.run(
                    self.role,
                    lambda sizes, ids=ids: list(
                        eval_batches(
                            store,
                            ids,
                            trainer=sizes,
                            num_data_groups=trainer.num_data_groups,
                            rows_per_example=rows.rows_per_example,
                        )
                    ),
                    lambda batches: score(trainer, self.role, batches),
                )
                for batch, logp_M in zip(batches, found, strict=True):
                    _fill(logp_N, store, batch, logp_M)
                progress(start + len(ids), len(rows.ids))
        return logp_N


def _fill(logp_N: FloatArray, store: RowStore, batch: TrainBatch, logp_M: FloatArray) -> None:
    """Write a batch's log-probs to the places of its rows' tokens in the store."""
    own_N = np.zeros(batch.num_tokens, dtype=np.float32)
    own_N[predicted_positions(batch)[0]] = logp_M
    for row_id, part in zip(
        batch.row_ids_B, np.split(own_N, np.cumsum(batch.lengths_B)[:-1]), strict=True
    ):
        logp_N[store.span(int(row_id))] = part


def _require_same_reference(state: RunState, checksums: Mapping[str, int]) -> None:
    """Raise CheckpointError if a resumed policy would be held to another reference than before.

    The reference itself is not in the checkpoint: it is made from model.path or reference.path,
    whose files may have changed.
    """
    digest = hashlib.sha256(json.dumps(sorted(checksums.items())).encode()).hexdigest()[:32]
    if state.reference_weights not in (None, digest):
        raise CheckpointError(
            "the policy in the checkpoint was trained with another reference than the current one "
            "(reference, or else the policy of model.path and lora.path): the weights differ. "
            "Restore the model's files, or start a new run with another `name`."
        )
    state.reference_weights = digest


def with_ref_logp(batches: Sequence[TrainBatch], trainer: Trainer) -> list[TrainBatch]:
    """Return the batches with log-probs under the reference as it is now."""
    found = []
    for batch, logp_M in zip(batches, score(trainer, Role.REFERENCE, batches), strict=True):
        logp_N = np.zeros(batch.num_tokens, dtype=np.float32)
        logp_N[predicted_positions(batch)[0]] = logp_M
        found.append(replace(batch, columns={**batch.columns, "ref_logp": logp_N}))
    return found


def completion_logps(rows: Sequence[TokenRow], role: Role, attempts: Attempts) -> FloatArray64:
    """Return the log-prob of each row's completion under a role's weights as they are now."""
    trainer, by_row = attempts.trainer, {}
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        batches, found = attempts.run(
            role,
            lambda sizes, some=some: micro_batches(
                some, sizes, num_data_groups=trainer.num_data_groups
            ),
            lambda batches: score(trainer, role, batches),
        )
        for batch, logp_M in zip(batches, found, strict=True):
            index_M, row_of_M = predicted_positions(batch)
            sums_B = np.zeros(batch.num_rows)
            np.add.at(sums_B, row_of_M, batch.weights_N[index_M].astype(np.float64) * logp_M)
            by_row |= dict(zip(batch.row_ids_B.tolist(), sums_B.tolist(), strict=True))
    return np.array([by_row[row.row_id] for row in rows])


def score_key(
    what: str, *, checksums: Mapping[str, int], precision: str, fingerprint: str, row_ids: IntArray
) -> str:
    """Return the name under which scores are kept."""
    parts = [FORMAT, what, sorted(checksums.items()), precision, fingerprint]
    digest = hashlib.sha256(json.dumps(parts).encode())
    digest.update(np.ascontiguousarray(row_ids, dtype=np.int64).tobytes())
    return digest.hexdigest()[:32]


def kept_scores(folder: Path, compute: Callable[[], Scores]) -> tuple[Scores, bool]:
    """Return the scores kept in a folder, or compute and keep them; True if they were computed."""
    found = _read(folder)
    if found is not None:
        return found, False
    scores = compute()
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.save(buffer, scores)
    content = buffer.getvalue()
    write_atomically(folder / "logp.npy", content)
    meta = {"sha256": hashlib.sha256(content).hexdigest()}
    # Written last: scores without it are not there.
    write_atomically(folder / "meta.json", json.dumps(meta))
    sync_folder(folder)
    return scores, True


def _read(folder: Path) -> Scores | None:
    try:
        meta = parse_json((folder / "meta.json").read_bytes())
        content = (folder / "logp.npy").read_bytes()
        if hashlib.sha256(content).hexdigest() != meta["sha256"]:
            return None
        return np.load(io.BytesIO(content), allow_pickle=False)
    except (OSError, ValueError, LookupError, TypeError):
        return None
