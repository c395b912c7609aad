"""Tokens per second fall during the run.

## What it sees
Throughput of the newest records below `share` of the first ones, falling steadily over at least
`min_records` records, the first of all left out.

## Why it matters
The run takes longer than planned; something grows, heats up or leaks.

## Likely causes
- throughput-falls: heat, another job on the machine, memory that is full, longer rows.
- expert-load-imbalance: in models with experts, see MOE002.

## What to do
Compare the times of the parts of a step: the part that grows says where to look.

## Known false alarms
Answers that get longer lower the rate of generation by nature.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, needed, rank_correlation
from homeostat.health.view import RunView


class Options(RuleOptions):
    share: float = option(0.7, "Share of the first rate that is too low.")
    min_records: int = option(12, "Records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    rate = needed(view, "throughput/tokens_per_s", "throughput/tokens_per_s_per_device")
    late = rate.finite().since(int(rate.steps[0]) + 1)
    if len(late) < options.min_records:
        return
    first, last = ends(late)
    if last > options.share * first or rank_correlation(late) > -0.7:
        return
    yield Sighting(
        message=f"Throughput fell from {first:.4g} to {last:.4g} tokens/s. Compare the times of a "
        "step's parts: the one that grows says why.",
        causes=(Cause("throughput-falls", f"{last / first:.0%} of what it was"),),
        fixes=(Fix("observe.profiler.steps", "two late steps", "shows what grew"),),
        first_step=int(late.steps[0]),
        last_step=int(late.steps[-1]),
        value=last,
        limit=options.share * first,
    )


RULE = Rule(
    code="PRF005",
    name="throughput-falls",
    family=Family.PERFORMANCE,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("throughput/tokens_per_s|throughput/tokens_per_s_per_device",),
    options=Options,
)
