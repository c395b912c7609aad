"""One rank is slower than the others at the same work, and all wait for it.

## What it sees
Each rank times a few products of matrices at every step, outside of any collective. Over the last
`window` records the slowest rank has less than `min_share` of the median rank's speed on average,
and it is the same rank in most of them.

## Why it matters
Ranks meet at each collective: a step takes as long as its slowest rank, and the time of the others
does not show it, since they wait for it inside the collectives.

## Likely causes
- straggler-rank: a device that is throttled by heat or power, another process on the same device or
  core, or a slower machine among equal ones.

## What to do
Look at the machine of that rank: clocks and temperature (nvidia-smi -q -d CLOCK,TEMPERATURE), other
processes, number of CPU threads. Replace it if it stays slow: the run resumes on other machines.

## Known false alarms
Ranks that share a core or a device are slow in turns; because the slowest rank must always be the
same one, they are not reported.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.view import RunView

# Share of the records in which one and the same rank must be the slowest.
SAME_RANK = 0.7


class Options(RuleOptions):
    window: int = option(10, "Number of records that are judged together.")
    min_share: float = option(0.67, "Speed, as a share of the median rank's, that is too low.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    shares = needed(view, "throughput/slowest_rank_share").finite().tail(options.window)
    ranks = needed(view, "throughput/slowest_rank").finite().tail(options.window)
    if len(shares) < options.window or len(ranks) < options.window:
        return
    share = float(np.mean(shares.values))
    numbers, counts = np.unique(ranks.values, return_counts=True)
    rank, count = int(numbers[counts.argmax()]), int(counts.max())
    if share >= options.min_share or count < SAME_RANK * len(ranks):
        return
    evidence = f"rank {rank} was the slowest in {count} of {len(ranks)} records"
    yield Sighting(
        message=f"Rank {rank} works at {share:.0%} of the median rank's speed (limit "
        f"{options.min_share:.0%}), and all wait for it. Look at its machine: heat, power, other "
        "processes.",
        evidence=(evidence,),
        causes=(Cause("straggler-rank", evidence),),
        fixes=(
            Fix(
                "",
                "another device in its place",
                "the run resumes on any machines",
                Grade.UNSAFE,
            ),
        ),
        first_step=int(shares.steps[0]),
        last_step=int(shares.steps[-1]),
        value=share,
        limit=options.min_share,
    )


RULE = Rule(
    code="DST005",
    name="slow-rank",
    family=Family.DISTRIBUTED,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("throughput/slowest_rank_share", "throughput/slowest_rank"),
    options=Options,
)
