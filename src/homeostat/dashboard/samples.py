"""Completions of a run: found by a text, sorted, a page at a time, with the tokens of each.

Ours are in Parquet files, one per step. Of other frameworks' runs there are those that their logs
print, as far as the readers found them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from homeostat.errors import HomeostatError
from homeostat.health.view import RunView
from homeostat.observe.completions import REWARD_PREFIX, completion_steps, read_completions

log = logging.getLogger(__name__)

Row = dict[str, Any]
MAX_PAGE = 200
# Tokens of a character that the tokenizer splits: no more are joined for it.
_MAX_JOINED = 8
_BROKEN = "�"

# Name of an order -> the key that it sorts by; rows without a value are last.
ORDERS: dict[str, Callable[[Row], float | None]] = {
    "order": lambda row: None,
    "reward": lambda row: row["reward"],
    "advantage": lambda row: row["advantage"],
    "length": lambda row: row["num_tokens"],
    "difference": lambda row: row["largest_difference"],
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which completions to show. `step` None is the newest step that has some."""

    step: int | None = None
    search: str = ""
    order: str = "order"
    descending: bool = True
    offset: int = 0
    limit: int = 20


def page_of(folder: Path, view: RunView, wanted: Wanted) -> dict[str, Any]:
    """Return one page of completions, the steps that have some, and how many match."""
    completions = folder / "completions"
    steps = completion_steps(completions)
    if steps:
        step = wanted.step if wanted.step is not None else steps[-1]
        rows = [_of_ours(row) for row in read_completions(completions, step)]
    else:
        rows = _of_log(view)
        steps = sorted({row["step"] for row in rows if row["step"] is not None})
        step = wanted.step
        rows = [row for row in rows if step is None or row["step"] == step]
    found = in_order(matching(rows, wanted.search), wanted)
    page = found[wanted.offset : wanted.offset + min(wanted.limit, MAX_PAGE)]
    decode = _decoder(view)
    for row in page:
        row["pieces"] = _pieces(row, decode)
        del row["token_ids"], row["logp_difference"]
    return {"steps": steps, "step": step, "total": len(found), "rows": page}


def matching(rows: Sequence[Row], search: str) -> list[Row]:
    """Return the rows whose prompt or completion contains the text, whatever its case."""
    text = search.casefold()
    return [
        row
        for row in rows
        if not text or text in row["completion"].casefold() or text in row["prompt"].casefold()
    ]


def in_order(rows: Sequence[Row], wanted: Wanted) -> list[Row]:
    """Sort rows. Raises HomeostatError for an order that does not exist."""
    if wanted.order not in ORDERS:
        raise HomeostatError(f"no order {wanted.order!r}; there are {', '.join(ORDERS)}.")
    if wanted.order == "order":
        return list(rows)
    key, sign = ORDERS[wanted.order], -1 if wanted.descending else 1

    def place(row: Row) -> tuple[bool, float]:
        value = key(row)
        known = value is not None and not math.isnan(value)
        return not known, sign * value if known and value is not None else 0.0

    return sorted(rows, key=place)


def _of_ours(row: Row) -> Row:
    differences = row.get("logp_difference")
    finite = [abs(value) for value in differences or () if not math.isnan(value)]
    return {
        "step": row["step"],
        "prompt": row["prompt"] or "",
        "completion": row["completion"] or "",
        "num_tokens": row["num_tokens"],
        "stop_reason": row["stop_reason"],
        "policy_version": row["policy_version"],
        "reward": row["reward"],
        "advantage": row["advantage"],
        "group": row["group"],
        "rewards": {
            name.removeprefix(REWARD_PREFIX): value
            for name, value in row.items()
            if name.startswith(REWARD_PREFIX)
        },
        "largest_difference": max(finite, default=None),
        "token_ids": row.get("token_ids"),
        "logp_difference": differences,
    }


def _of_log(view: RunView) -> list[Row]:
    return [
        {
            "step": sample.step,
            "prompt": sample.prompt,
            "completion": sample.text,
            "num_tokens": sample.num_tokens,
            "stop_reason": sample.stop_reason,
            "policy_version": None,
            "reward": sample.reward,
            "advantage": None,
            "group": None,
            "rewards": {},
            "largest_difference": None,
            "token_ids": None,
            "logp_difference": None,
        }
        for sample in view.samples
    ]


Decode = Callable[[Sequence[int]], str]


def _decoder(view: RunView) -> Decode | None:
    """Return how tokens become text; None if the run's tokenizer is not at hand."""
    for key in ("model.tokenizer", "model.path"):
        folder = view.setting(key)
        if not isinstance(folder, str):
            continue
        file = Path(folder) / "tokenizer.json"
        # The folder may be one that only the run's owner may enter.
        with contextlib.suppress(OSError, ValueError):
            if file.is_file():
                return _read_tokenizer(file, file.stat().st_mtime_ns)
    return None


@functools.lru_cache(maxsize=4)
def _read_tokenizer(file: Path, modified: int) -> Decode | None:
    if find_spec("tokenizers") is None:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        log.warning("%s cannot be read, so tokens are not shown: %s", file, error)
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def _pieces(row: Row, decode: Decode | None) -> list[tuple[str, float | None]] | None:
    """Return the text of each token with its difference; None if that is not known.

    Tokens that form one character together are one piece, with the largest of their differences.
    """
    ids, differences = row["token_ids"], row["logp_difference"]
    if decode is None or not ids or not differences:
        return None
    pieces: list[tuple[str, float | None]] = []
    start = 0
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        if text.endswith(_BROKEN) and end - start < _MAX_JOINED and end < len(ids):
            continue
        known: list[float] = [value for value in differences[start:end] if not math.isnan(value)]
        pieces.append((text, max(known, key=abs) if known else None))
        start = end
    return pieces
