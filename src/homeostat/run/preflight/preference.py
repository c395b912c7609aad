"""Check a preference recipe before the first step: labels, the reference, and its scores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.config.preference import KtoConfig
from homeostat.config.rollout import AnyReference
from homeostat.config.run import RunConfig
from homeostat.data.inputs import RowSet
from homeostat.data.store import RowStore
from homeostat.observe import format as fmt
from homeostat.run.preflight.item import Item

# Weighted desirable rows per weighted undesirable row: the paper's range (arXiv:2402.01306, 4.2).
BALANCE = (1.0, 1.34)


def preference_items(config: RunConfig, rows: RowSet[RowStore]) -> Iterator[Item]:
    """Report with what the policy is compared and, for kto, whether good and bad rows balance."""
    choice = config.used_reference
    if choice is None:
        yield Item("reference", "ok", f"{config.algorithm.type} has none")
    else:
        yield Item("reference", "ok", _reference_text(config, rows, choice))
    if isinstance(config.algorithm, KtoConfig):
        yield _balance_item(config.algorithm, rows)


def _reference_text(config: RunConfig, rows: RowSet[RowStore], choice: AnyReference) -> str:
    what = {
        "initial": "the policy that the run starts from",
        "checkpoint": getattr(choice, "path", ""),
        "adapter_off": "the model without its adapter",
    }[choice.type]
    if not config.precomputes_reference:
        return f"{what}; it scores the rows of each step"
    size = fmt.byte_size(4 * int(rows.rows.lengths[rows.ids].sum()))
    return f"{what}; it scores all rows before the first step ({size} in the run folder)"


def _balance_item(algorithm: KtoConfig, rows: RowSet[RowStore]) -> Item:
    labels_B = rows.rows.labels_B[rows.ids]
    good, bad = int((labels_B > 0).sum()), int((labels_B < 0).sum())
    facts = {"desirable": good, "undesirable": bad}
    text = f"{good} desirable and {bad} undesirable rows"
    if not (good and bad):
        why = f"{text}: kto cannot learn from only one kind. Add rows of the other kind"
        return Item("labels", "warning", why, facts)
    ratio = algorithm.desirable_weight * good / (algorithm.undesirable_weight * bad)
    low, high = BALANCE
    if 1 / high <= ratio <= high:
        return Item("labels", "ok", text, facts)
    wanted = float(np.clip(ratio, low, high)) / ratio * algorithm.desirable_weight
    why = (
        f"{text}: with the weights, {ratio:.2g} to 1. The paper advises 1 to 1.33: set "
        f"algorithm.desirable_weight={wanted:.3g}"
    )
    return Item("labels", "warning", why, facts)
