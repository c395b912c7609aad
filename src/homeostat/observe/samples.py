"""Choose which completions of a step to show: the best and the worst, one per prompt.

Among equal rewards those with the largest advantage come first: a success that is still rare, or a
failure that is no longer expected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

Row = Mapping[str, Any]


def best_and_worst_prompts(rows: Sequence[Row], n: int) -> tuple[list[Row], list[Row]]:
    """Return up to `n` rows of highest reward and `n` others of lowest, each of another prompt.

    Rows need `prompt` and `reward`; those without a reward are in neither list.
    """
    ranked = sorted((row for row in rows if _is_number(row["reward"])), key=_rank)
    best = _one_per_prompt(reversed(ranked), n)
    taken = {id(row) for row in best}
    return best, _one_per_prompt((row for row in ranked if id(row) not in taken), n)


def _rank(row: Row) -> tuple[float, float]:
    advantage = row.get("advantage")
    return row["reward"], (advantage if _is_number(advantage) else 0.0)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not math.isnan(value)


def _one_per_prompt(rows: Iterable[Row], n: int) -> list[Row]:
    found: dict[str, Row] = {}
    for row in rows:
        if len(found) == n:
            break
        found.setdefault(row["prompt"], row)
    return list(found.values())
