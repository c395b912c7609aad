"""Compares engine and trainer on the same tokens of a step, and shows the worst differences.

    columns of the rows, log-probs of the first update -> one table of tokens -> metrics
                                                                              -> worst tokens

The trainer's log-probs are those at the beginning of the step: the `old_logp` column where rows
were scored before, else those that the first update computed. Only tokens that the engine sampled
are in the table, so tokens that a tool wrote, which have no log-prob, do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from homeostat.algorithms.mismatch import TokenPairs, furthest, is_notable, mismatch_metrics
from homeostat.arrays import FloatArray, IntArray
from homeostat.columns import dense
from homeostat.run.learning.updates import StepRows
from homeostat.types import RolloutGroup, UpdateReport

NUM_WORST = 8
# Tokens shown before and after one of the worst.
NUM_CONTEXT = 8


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A token whose probabilities in engine and trainer differ greatly.

    `row` is its row of the step, `sample` its place in the prompt's group, `position` that of the
    token in the completion.
    """

    row: int
    prompt_id: int
    sample: int
    position: int
    token_id: int
    engine_logp: float
    trainer_logp: float
    policy_version: int

    @property
    def difference(self) -> float:
        return self.trainer_logp - self.engine_logp


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of a comparison: metrics, the worst tokens, and whether they are notable.

    `differences_ST` has the trainer's log-prob less the engine's for each token of each completion,
    NaN where it is not known.
    """

    metrics: Mapping[str, float]
    worst: tuple[WorstToken, ...]
    notable: bool
    differences_ST: list[FloatArray]


@dataclass(frozen=True, slots=True)
class _Table:
    """The compared tokens: their row of the step, place in the completion, and version."""

    pairs: TokenPairs
    position_M: IntArray
    version_M: IntArray


def known_logp(rows: StepRows, reports: Iterable[UpdateReport]) -> dict[int, FloatArray]:
    """Per row of which they are known, the trainer's log-probs at the beginning of the step."""
    found: dict[int, FloatArray] = {}
    for report in reports:
        found |= dict(zip(report.row_ids_B.tolist(), report.row_logp, strict=True))
    # Rows of the truth, which no engine sampled, have numbers beyond those of the samples.
    found = {row_id: logp_M for row_id, logp_M in found.items() if row_id < len(rows.rows)}
    for index, row in enumerate(rows.rows):
        if "old_logp" in row.columns:
            found[index] = dense(row.columns["old_logp"])[row.weights_T > 0]
    return found


def compare(
    groups: Sequence[RolloutGroup],
    rows: StepRows,
    known: Mapping[int, FloatArray],
    *,
    spans: Sequence[range],
    updates_per_step: int,
    version: int | None,
) -> Compared:
    """`version` is the policy's at the beginning of the step; None where the versions of these
    groups are not of this run. `spans` are the groups of each update.

    A token's staleness counts every update that was due since its policy was published, also one
    without signal or not applied: so a resumed run measures what an uninterrupted one does.
    """
    if not known:
        return Compared({}, (), notable=False, differences_ST=[])
    table = _table(groups, rows, known, version)
    metrics = mismatch_metrics(table.pairs)
    if table.pairs.age_M is not None and metrics:
        first_group = np.array([span.start for span in spans])
        group_M = rows.group_R[table.pairs.row_of_M]
        update_M = np.searchsorted(first_group, group_M, side="right") - 1
        stale_M = table.pairs.age_M * updates_per_step + update_M
        metrics["stale/updates/mean"] = float(stale_M.mean())
        metrics["stale/updates/max"] = float(stale_M.max())
    worst = furthest(table.pairs, NUM_WORST)
    notable = bool(is_notable(table.pairs)[worst].any())
    described = _described(worst, groups, rows, table)
    return Compared(metrics, described, notable, _differences(groups, rows, table))


def _table(
    groups: Sequence[RolloutGroup],
    rows: StepRows,
    known: Mapping[int, FloatArray],
    version: int | None,
) -> _Table:
    samples = [sample for group in groups for sample in group.samples]
    chosen = sorted(known)
    trained = {index: rows.rows[index].weights_T > 0 for index in chosen}
    engine = [dense(rows.rows[index].columns["engine_logp"])[trained[index]] for index in chosen]
    position_M = np.concatenate([rows.completion_places(index)[trained[index]] for index in chosen])
    versions = [
        samples[rows.sample_R[index]].completion.policy_versions_T[
            rows.policy_places(index)[trained[index]]
        ]
        for index in chosen
    ]
    version_M = np.concatenate(versions)
    pairs = TokenPairs(
        engine_logp_M=np.concatenate(engine).astype(np.float64),
        trainer_logp_M=np.concatenate([known[index] for index in chosen]).astype(np.float64),
        row_of_M=np.repeat(chosen, [len(known[index]) for index in chosen]),
        age_M=None if version is None else version - version_M,
    )
    return _Table(pairs, position_M, version_M)


def _differences(groups: Sequence[RolloutGroup], rows: StepRows, table: _Table) -> list[FloatArray]:
    samples = [sample for group in groups for sample in group.samples]
    found = [np.full(len(sample.completion), np.nan, np.float32) for sample in samples]
    difference_M = table.pairs.trainer_logp_M - table.pairs.engine_logp_M
    for row in np.unique(table.pairs.row_of_M).tolist():
        chosen_M = table.pairs.row_of_M == row
        found[int(rows.sample_R[row])][table.position_M[chosen_M]] = difference_M[chosen_M]
    return found


def _described(
    worst: IntArray, groups: Sequence[RolloutGroup], rows: StepRows, table: _Table
) -> tuple[WorstToken, ...]:
    first_S = np.searchsorted(rows.group_S, rows.group_S)
    found = []
    for place in worst.tolist():
        row, position = int(table.pairs.row_of_M[place]), int(table.position_M[place])
        sample = int(rows.sample_R[row])
        found.append(
            WorstToken(
                row=row,
                prompt_id=groups[int(rows.group_S[sample])].prompt.prompt_id,
                sample=sample - int(first_S[sample]),
                position=position,
                token_id=int(rows.rows[row].tokens_T[_place_in_row(rows, row, position)]),
                engine_logp=float(table.pairs.engine_logp_M[place]),
                trainer_logp=float(table.pairs.trainer_logp_M[place]),
                policy_version=int(table.version_M[place]),
            )
        )
    return tuple(found)


def _place_in_row(rows: StepRows, row: int, position: int) -> int:
    """Return the place in a row of the token at `position` of its completion."""
    return int(np.flatnonzero(rows.completion_places(row) == position)[0])


def with_text(
    worst: Sequence[WorstToken], rows: StepRows, *, decode: Callable[[list[int]], str]
) -> list[dict[str, Any]]:
    """Return the worst tokens as text, each with the text around it."""
    shown = []
    for token in worst:
        tokens = rows.rows[token.row].tokens_T.tolist()
        place = _place_in_row(rows, token.row, token.position)
        shown.append(
            {
                "prompt_id": token.prompt_id,
                "sample": token.sample,
                "position": token.position,
                "token_id": token.token_id,
                "before": decode(tokens[max(0, place - NUM_CONTEXT) : place]),
                "text": decode(tokens[place : place + 1]),
                "after": decode(tokens[place + 1 : place + 1 + NUM_CONTEXT]),
                "engine_logp": token.engine_logp,
                "trainer_logp": token.trainer_logp,
                "policy_version": token.policy_version,
            }
        )
    return shown
