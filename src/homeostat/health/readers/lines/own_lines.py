"""Parse the progress lines of our own runs, which are on the console and in console.log.

step  6/32  loss 1.8044  lr 3.00e-03  grad    1.3  3.1k tok/s  mem  497 MiB  eta 11 s
step  1/24  reward  0.375  +- 0.330  len 6.469  cut   12 %  entropy 0.432  clip    0 %
"""

from __future__ import annotations

import re

from homeostat.health.readers.rows.row import Row
from homeostat.health.readers.values.numbers import NUMBER, number

_STEP = re.compile(r"(?:^|homeostat\.progress: )step {1,12}(\d{1,12})/(\d{1,12})  (?=\S)")
# Name of a column (observe/transcript.py) -> metric.
_NAMES = {
    "loss": "train/loss",
    "lr": "learning_rate",
    "grad": "grad_norm",
    "reward": "reward",
    "+-": "reward_std",
    "len": "completions/mean_length",
    "cut": "completions/clipped_ratio",
    "entropy": "entropy",
    "kl": "kl",
    "clip": "clip_ratio/region_mean",
    "diff": "sampling/sampling_logp_difference/mean",
    "eval": "eval/loss",
}
_CELL = re.compile(
    rf"(?<=  )(?P<name>{'|'.join(map(re.escape, _NAMES))}) {{1,12}}(?P<value>{NUMBER})(?P<unit> %)?"
)
_MAX_CHARS = 1_000


def own_row(body: str) -> Row | None:
    """Return the row of a progress line of ours; None for other lines."""
    found = _STEP.search(body) if "step " in body and len(body) <= _MAX_CHARS else None
    if not found:
        return None
    values = {}
    for cell in _CELL.finditer(body, found.end() - 2):
        value = number(cell["value"] + ("%" if cell["unit"] else ""))
        if value is not None:
            values[_NAMES[cell["name"]]] = value
    if not values.keys() & {"train/loss", "reward"}:
        return None
    if "reward" in values and "eval/loss" in values:
        values["eval/reward"] = values.pop("eval/loss")
    return Row(values, int(found[1]), form="homeostat", total_steps=int(found[2]))
