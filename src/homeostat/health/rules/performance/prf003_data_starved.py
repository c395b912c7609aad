"""Updates wait for their rows.

## What it sees
time/data_wait above `max_share` of time/step on the median of the newest records.

## Why it matters
The device is idle while the next rows are tokenised or read.

## Likely causes
- data-starved: tokenising during training, one process, a slow disk.

## What to do
More processes that prepare (data.num_processes), more updates ahead, or prepare once and cache.

## Known false alarms
Tiny models, whose step takes less than reading a row.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(0.2, "Largest acceptable share of a step.")
    warn_share: float = option(0.6, "Share from which on it is a warning.")
    min_s: float = option(0.05, "Seconds below which it does not matter.")
    sure: int = option(8, "Number of records that a warning needs.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    wait, step = needed(view, "time/data_wait").tail(20), needed(view, "time/step").tail(20)
    seconds = median(wait.values)
    share = seconds / max(median(step.values), 1e-9)
    if len(wait) < 5 or share <= options.max_share or seconds < options.min_s:
        return
    yield Sighting(
        message=f"Updates wait {seconds:.3g} s for their rows, {share:.0%} of a step (usual: below "
        f"{options.max_share:.0%}). Prepare rows with more processes, or further ahead.",
        causes=(Cause("data-starved", f"{share:.0%} of a step"),),
        fixes=(
            Fix("data.prefetch_updates", "8", "batches are prepared further ahead", Grade.SAFE),
            Fix("data.num_processes", "4", "more rows are prepared at one time", Grade.SAFE),
        ),
        first_step=int(wait.steps[0]),
        last_step=int(wait.steps[-1]),
        value=share,
        limit=options.max_share,
        level=Level.WARN if share > options.warn_share and len(wait) >= options.sure else None,
    )


RULE = Rule(
    code="PRF003",
    name="data-starved",
    family=Family.PERFORMANCE,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("time/data_wait", "time/step"),
    options=Options,
)
