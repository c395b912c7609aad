"""Two runs in one log have the same losses but gradient norms of different size.

## What it sees
An earlier run in the same log whose losses agree with this one's record by record, while the
gradient norms differ by a factor of `factor` or more, the same for all records.

## Why it matters
If the losses agree, the updates agree. Only how the norm is reported has changed: summed over ranks
or averaged, before or after unscaling.

## Likely causes
- benign-gradnorm-version-change: another version of the library reports it differently.

## What to do
Change nothing in the run. Only adjust thresholds on the norm, and clipping that is computed from
the reported value.

## Known false alarms
None known: runs whose losses agree to four digits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import RunView, Series


class Options(RuleOptions):
    factor: float = option(3.0, "Factor by which the norms differ.")
    same: float = option(0.01, "Relative difference up to which losses agree.")
    min_records: int = option(3, "Number of records that both must have.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    loss, norm = needed(view, "train/loss"), needed(view, "grad_norm")
    for run in view.facts["runs"]:
        other_loss: Series | None = run["metrics"].get("train/loss")
        other_norm: Series | None = run["metrics"].get("grad_norm")
        if other_loss is None or other_norm is None:
            continue
        count = min(len(loss), len(other_loss), len(norm), len(other_norm))
        if count < options.min_records:
            continue
        mine, theirs = loss.values[:count], other_loss.values[:count]
        off = np.max(np.abs(mine - theirs) / np.maximum(np.abs(theirs), 1e-9))
        ratios = norm.values[:count] / np.maximum(other_norm.values[:count], 1e-12)
        ratio = median(ratios)
        steady = float(np.max(np.abs(ratios / ratio - 1))) < 0.3
        if off > options.same or not steady or 1 / options.factor < ratio < options.factor:
            continue
        yield Sighting(
            message=f"Two runs of this log have the same losses, and gradient norms that differ by "
            f"a constant factor of {ratio:.3g}: only the reported norm changed. Nothing to do.",
            evidence=(f"losses agree within {off:.1%} over {count} records",),
            causes=(Cause("benign-gradnorm-version-change", "same losses, another unit"),),
            first_step=int(loss.steps[0]),
            last_step=int(loss.steps[-1]),
            value=ratio,
        )
        return


RULE = Rule(
    code="LRN017",
    name="benign-gradnorm-version-change",
    family=Family.LEARNING,
    level=Level.INFO,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("fact:runs", "train/loss", "grad_norm"),
    options=Options,
)
