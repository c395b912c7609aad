"""The rewards of two agents oscillate against each other.

## What it sees
Rewards of two agents (`agents/<name>/reward`) that rise and fall in turn: strongly opposed changes,
with at least `swings` reversals larger than their noise.

## Why it matters
Each agent learns to beat the other's last policy and forgets the one before, so neither improves.

## Likely causes
- agents-oscillate: both agents are updated at the same time, and often.

## What to do
Update them in turn, less often, or against a population of older policies.

## Known false alarms
Rewards of zero-sum games are always opposed; without large swings nothing is reported.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    swings: int = option(3, "Number of reversals from which on it is an oscillation.")
    min_records: int = option(20, "Number of records that are needed.")
    min_span: float = option(0.2, "Smallest span of the rewards that matters.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    rewards = view.matching("agents/", "/reward")
    if len(rewards) < 2:
        yield Unknown("fewer than two agents' rewards were logged")
        return
    (name, first), (other, second), *_ = sorted(rewards.items())
    first, second = first.finite().on(second.finite())
    if len(first) < options.min_records:
        return
    opposed = float(np.corrcoef(first.values, second.values)[0, 1])
    middle = first.values - median(first.values)
    far = middle[np.abs(middle) > 0.5 * float(np.std(middle))]
    turns = int(np.sum(np.sign(far[1:]) != np.sign(far[:-1])))
    span = float(np.ptp(first.values))
    # Noise changes its sign at every second record; a swing lasts several.
    if opposed > -0.6 or not options.swings <= turns <= 0.3 * len(first) or span < options.min_span:
        return
    yield Sighting(
        message=f"The rewards of {name} and {other} swing against each other ({turns} reversals, "
        f"correlation {opposed:.2f}): neither gets better. Update them in turn, and less often.",
        causes=(Cause("agents-oscillate", f"{turns} reversals"),),
        fixes=(
            Fix(
                "",
                "train the agents in turn",
                "one agent learns while the other stays as it is",
            ),
        ),
        first_step=int(first.steps[0]),
        last_step=int(first.steps[-1]),
        value=float(turns),
    )


RULE = Rule(
    code="AGT001",
    name="agents-oscillate",
    family=Family.AGENTS,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    kinds=(Kind.RL,),
    options=Options,
)
