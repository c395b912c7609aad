"""Claim: packing fills at least 97 % of the token budget on realistic lengths.

Rows have the lengths of the other benchmarks (GSM8K's, see common.py). Packed rows have no padding,
so every token computed is real; `padding_real_share` is that share when the same rows, in order,
are padded to the longest of a micro-batch. fill = tokens / (micro-batches * budget) says how many
micro-batches the budget costs. It is measured twice:

    whole set   all rows packed at once, per budget: the packer alone. The claim is judged here.
    per update  `trainer.batch_rows` rows at a time, as a trainer does. An update's rows are given,
                so its last micro-batch is rarely full, and no packer can pass `best_possible` =
                tokens / (ceil(tokens / budget) * budget). Small updates lie far below 97 %.
                `share_of_best` compares with that bound.

    python bench/packing_fill.py
"""

from __future__ import annotations

import argparse
import math
import random
import time
from typing import Any

import common

from homeostat.data.packing import pack

BUDGETS = (1024, 2048, 4096, 8192, 16384)
BATCH_ROWS = (16, 32, 128, 512, 2048)
TEMPLATE_TOKENS = 12
CLAIMED_FILL = 0.97


def row_lengths(num_rows: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [sum(common.draw_lengths(rng)) + TEMPLATE_TOKENS for _ in range(num_rows)]


def padded_tokens(lengths: list[int], budget: int) -> int:
    """Tokens computed when rows are taken in order and padded to the longest of a micro-batch."""
    total, rows, longest = 0, 0, 0
    for length in lengths:
        if (rows + 1) * max(longest, length) > budget:
            total += rows * longest
            rows, longest = 0, 0
        rows, longest = rows + 1, max(longest, length)
    return total + rows * longest


def measure(lengths: list[int], *, budget: int, batch_rows: int) -> dict[str, Any]:
    updates = [lengths[at : at + batch_rows] for at in range(0, len(lengths), batch_rows)]
    started = time.perf_counter()
    num_bins = sum(len(pack(update, budget)) for update in updates)
    seconds = time.perf_counter() - started
    tokens = sum(lengths)
    fewest = sum(math.ceil(sum(update) / budget) for update in updates)
    computed = sum(padded_tokens(update, budget) for update in updates)
    return {
        "max_tokens_per_device": budget,
        "batch_rows": batch_rows,
        "fill": round(tokens / (num_bins * budget), 4),
        "best_possible": round(tokens / (fewest * budget), 4),
        "share_of_best": round(fewest / num_bins, 4),
        "padding_real_share": round(tokens / computed, 4),
        "pack_ms_per_update": round(1000 * seconds / len(updates), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    lengths = row_lengths(arguments.rows, seed=arguments.seed)
    whole = [measure(lengths, budget=budget, batch_rows=len(lengths)) for budget in BUDGETS]
    per_update = [
        measure(lengths, budget=budget, batch_rows=batch_rows)
        for budget in BUDGETS
        for batch_rows in BATCH_ROWS
    ]
    min_fill = min(entry["fill"] for entry in whole)
    result = common.machine(("numpy",)) | {
        "rows": arguments.rows,
        "lengths": common.percentiles(lengths),
        "min_fill_whole_set": min_fill,
        "claim_holds": min_fill >= CLAIMED_FILL,
        "min_share_of_best_per_update": min(entry["share_of_best"] for entry in per_update),
        "whole_set": whole,
        "per_update": per_update,
    }
    common.write_result("packing_fill", result)


if __name__ == "__main__":
    main()
