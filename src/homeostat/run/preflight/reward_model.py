"""Check the recipe of a reward model before the first step: the labels of its rows."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.kind import RunKind
from homeostat.config.reward_model import BradleyTerryLoss
from homeostat.config.run import RunConfig
from homeostat.data.inputs import RowSet
from homeostat.data.store import RowStore
from homeostat.observe import format as fmt
from homeostat.run.evaluation.reward_model_measure import require_scores
from homeostat.run.preflight.item import Item
from homeostat.run.preflight.preference import preference_items


def label_items(config: RunConfig, rows: RowSet[RowStore]) -> Iterator[Item]:
    """Show the labels of rows that have any: preferences, margins or scores."""
    if config.kind is RunKind.PREFERENCE:
        yield from preference_items(config, rows)
    if config.kind is RunKind.REWARD_MODEL:
        yield from _reward_model_items(config, rows)


def _reward_model_items(config: RunConfig, rows: RowSet[RowStore]) -> Iterator[Item]:
    """Report the margins of pairs, or the scores to be learnt."""
    algorithm = config.for_rows.rewarding
    require_scores(algorithm, rows)
    labels_B = rows.rows.labels_B[rows.ids]
    if isinstance(algorithm.loss, BradleyTerryLoss):
        margins_P = labels_B[0::2]
        facts = {"pairs": len(rows), "largest_margin": float(margins_P.max())}
        low, high = fmt.number(float(margins_P.min())), fmt.number(float(margins_P.max()))
        by = "all to differ by more than 0"
        if config.data.has_margin:
            by = f"margins from {low} to {high}"
        yield Item("labels", "ok", f"{len(rows)} pairs, {by}", facts)
        return
    low, high = float(labels_B.min()), float(labels_B.max())
    facts = {"rows": len(rows), "lowest": low, "highest": high}
    text = f"{len(rows)} scores from {fmt.number(low)} to {fmt.number(high)}"
    if low == high:
        yield Item("labels", "warning", f"{text}: the same for all, which teaches nothing", facts)
    else:
        yield Item("labels", "ok", text, facts)
