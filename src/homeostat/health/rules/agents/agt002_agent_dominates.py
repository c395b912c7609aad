"""One agent always wins, and the other learns nothing.

## What it sees
Over the newest records one agent's reward is above `high` of the span of all rewards and another's
below `low`, steadily.

## Why it matters
If the outcome is certain, all answers earn the same, and neither agent gets a gradient.

## Likely causes
- agent-dominates: one is far better, or learns far faster.

## What to do
Hold the stronger one back (update it less often), or let the weaker play against older policies of
it.

## Known false alarms
Games whose roles are unequal by nature.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    high: float = option(0.9, "Share of the span that wins always.")
    low: float = option(0.1, "Share that never does.")
    min_records: int = option(12, "Number of records that are needed.")
    min_span: float = option(0.6, "Smallest span of the rewards that matters.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    rewards = {name: s.finite() for name, s in view.matching("agents/", "/reward").items()}
    rewards = {name: s for name, s in rewards.items() if len(s) >= options.min_records}
    if len(rewards) < 2:
        yield Unknown("fewer than two agents' rewards were logged")
        return
    low = min(float(s.values.min()) for s in rewards.values())
    span = max(float(s.values.max()) for s in rewards.values()) - low
    late = {
        name: (float(s.tail(8).values.mean()) - low) / max(span, 1e-9)
        for name, s in rewards.items()
    }
    best, worst = max(late, key=lambda n: late[n]), min(late, key=lambda n: late[n])
    steady = all(float(np.std(rewards[n].tail(8).values)) < 0.1 * span for n in (best, worst))
    if (
        span < options.min_span
        or late[best] < options.high
        or late[worst] > options.low
        or not steady
    ):
        return
    yield Sighting(
        message=f"{best} wins nearly always and {worst} never: neither has anything to learn from. "
        f"Update {best} less often.",
        causes=(
            Cause("agent-dominates", f"{late[best]:.0%} against {late[worst]:.0%} of the span"),
        ),
        fixes=(
            Fix(
                "",
                "keep older policies of each agent",
                "a population to play against",
            ),
        ),
        first_step=int(rewards[best].tail(8).steps[0]),
        last_step=int(rewards[best].steps[-1]),
        value=late[best],
        limit=options.high,
    )


RULE = Rule(
    code="AGT002",
    name="agent-dominates",
    family=Family.AGENTS,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    kinds=(Kind.RL,),
    options=Options,
)
