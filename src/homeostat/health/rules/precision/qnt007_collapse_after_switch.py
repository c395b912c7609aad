"""Training broke down when low precision began.

## What it sees
The run began in bf16 and switched at a known step (`start_step`, event precision_switched). In the
`window` records after the switch the loss, or in RL the reward, is worse than in the `window`
records before it by more than `factor` and by more than their own spread, or it is not finite; and
the newest records are no better.

## Why it matters
The weights are those of the step before; only the arithmetic changed. Each further step trains on a
broken forward pass and damages weights that were good.

## Likely causes
- collapse-after-switch: layers that do not tolerate the format (the head, the first and last
  layers), wrong scales, or weights that still have large outliers.

## What to do
Go back to the checkpoint before the switch; switch later, leave more layers out, or stay in bf16.

## Known false alarms
A rise that recovers: rounding costs a little, and INT4 training needs some tens of steps to make up
for it. As soon as the newest records have recovered, the rule is silent. A loss that was already
rising before the switch is not blamed on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.precision.kinds import start_of, trained_format
from homeostat.health.series.medians import median
from homeostat.health.series.noise import robust_scale
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    window: int = option(5, "Records before and after the switch that are compared.")
    factor: float = option(1.25, "How much higher the loss may be after the switch.")
    lost_share: float = option(0.5, "Share of the reward that may be lost.")
    spreads: float = option(6.0, "Distance in spreads of the records before the switch.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    start = start_of(view)
    if start is None:
        yield Unknown("the run did not switch its precision")
        return
    metric = "reward" if view.kind is Kind.RL and view.series("reward") else "train/loss"
    series = view.series(metric)
    if series is None:
        yield Unknown(f"the metric {metric} was not logged")
        return
    before, after = series.before(start).tail(options.window), series.since(start)
    if len(before) < 3 or len(after) < 3:
        yield Unknown("too few records on one side of the switch")
        return
    limit = _limit(before, options, is_reward=metric == "reward")
    if limit is None or not _is_worse(after, limit, options, is_reward=metric == "reward"):
        return
    was, now = median(before.values), _level(after.tail(options.window))
    form = trained_format(view) or "fp8"
    yield Sighting(
        message=f"{metric} was {was:.3g} before the switch to {form} at step {start} and is "
        f"{now:.3g} since. Go back to a checkpoint before the switch; switch later, leave more "
        "layers out, or stay in bf16.",
        evidence=(f"{metric} {was:.3g} -> {_level(after.head(options.window)):.3g}",),
        causes=(Cause("collapse-after-switch", f"{metric} changed at step {start}, the switch"),),
        fixes=(
            Fix("checkpoint.load_step", f"before {start}", "the weights before the switch"),
            Fix(f"trainer.{form}.start_step", str(2 * start), "switches later", Grade.UNSAFE),
            Fix(f"trainer.{form}.skip_layers", "first and last", "stay in bf16", Grade.UNSAFE),
        ),
        first_step=start,
        last_step=int(after.steps[-1]),
        value=now if math.isfinite(now) else None,
        limit=limit,
    )


def _level(series: Series) -> float:
    """Return the median, or NaN where most records are not finite."""
    good = series.finite().values
    return median(good) if 2 * len(good) > len(series) else float("nan")


def _limit(before: Series, options: Options, *, is_reward: bool) -> float | None:
    """Return the value from which on a record is worse than before by more than chance."""
    values = before.finite().values
    if len(values) < 3:
        return None
    usual, spread = robust_scale(values)
    if is_reward:
        return min(usual * options.lost_share, usual - options.spreads * spread)
    # A loss that rises anyway continues to rise.
    rise = max(0.0, float(values[-1] - values[0]))
    return max(usual * options.factor, usual + options.spreads * spread) + rise


def _is_worse(after: Series, limit: float, options: Options, *, is_reward: bool) -> bool:
    """Return whether both the first and the newest records are beyond the limit."""
    for part in (after.head(options.window), after.tail(options.window)):
        level = _level(part)
        if np.isfinite(level) and (level >= limit if is_reward else level <= limit):
            return False
    return True


RULE = Rule(
    code="QNT007",
    name="collapse-after-switch",
    family=Family.PRECISION,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("train/loss|reward",),
    options=Options,
    explains=(
        *("LRN002", "LRN010", "NUM001", "NUM002", "NUM005", "NUM006", "RWD006", "POL013"),
        *("LRN009", "QNT005", "QNT006", "QNT010", "QNT011"),
    ),
)
