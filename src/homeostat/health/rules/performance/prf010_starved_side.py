"""In an asynchronous run, trainer or engines wait for the other side, step after step.

## What it sees
The trainer waits for groups (time/wait_groups) and for completions that must end before it can
publish (time/wait_drain), or the engines sample nothing (time/engine_idle), for more than `share`
of the step, in the median of the last `window` records. A trainer that waits more than twice that
is a warning.

## Why it matters
Both sides run at the speed of the slower one: the devices of the other are paid for and idle.

## Likely causes
- trainer-starved: the engines sample and score fewer groups than the trainer could learn from.
- engines-starved: the trainer learns from fewer groups than the engines could sample.

## What to do
Move devices from the side that waits to the other; the message says by which ratio. Where that is
not possible, let samples be older (rollout.max_staleness) so that short waits are bridged, and let
completions continue under new weights (rollout.partial) so that none must end first.

## Known false alarms
A run whose rewards are slow: the trainer waits, and more engines would not help. time/reward says
so, and the rule is silent where rewards are most of the wait.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import RunView

PARTIAL = Fix("rollout.partial", "true", "completions need not end before a publication")


class Options(RuleOptions):
    share: float = option(0.25, "Share of a step from which on waiting is too much.")
    window: int = option(8, "Number of records that are judged together.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    step_s = _median(view, "time/step", options.window)
    drain_s = _median(view, "time/wait_drain", options.window) if _drains(view) else 0.0
    waits_s = _median(view, "time/wait_groups", options.window) + drain_s
    idle_s = _median(view, "time/engine_idle", options.window)
    records = needed(view, "time/wait_groups").finite()
    if len(records) < options.window or step_s <= 0.0:
        return
    rewards = view.metrics.get("time/reward")
    reward_s = median(rewards.finite().values[-options.window :]) if rewards else 0.0
    if waits_s > options.share * step_s and waits_s >= idle_s and reward_s < 0.5 * waits_s:
        # The trainer would be busy all the time if groups came in the time that it works.
        ratio = step_s / max(step_s - waits_s, 1e-9)
        yield _sighting(
            f"The trainer waits for the engines {waits_s / step_s:.0%} of a step: they would have "
            f"to sample {ratio:.2g} times as fast to keep it busy.",
            name="trainer-starved",
            evidence=f"{waits_s:.3g} s of {step_s:.3g} s",
            fixes=(
                *([PARTIAL] if drain_s > 0.5 * waits_s else []),
                Fix("engine.data_parallel_size", f"{ratio:.2g} times as many", "more samples"),
                Fix("rollout.max_staleness", "one more", "bridges short waits", Grade.UNSAFE),
            ),
            value=waits_s / step_s,
            level=Level.WARN if waits_s > 2 * options.share * step_s else None,
            options=options,
            first_step=int(records.steps[-options.window]),
        )
    elif idle_s > options.share * step_s:
        ratio = step_s / max(step_s - idle_s, 1e-9)
        yield _sighting(
            f"The engines sample nothing {idle_s / step_s:.0%} of a step: 1/{ratio:.2g} of them "
            "would be enough, or a trainer that is faster by this factor.",
            name="engines-starved",
            evidence=f"{idle_s:.3g} s of {step_s:.3g} s",
            fixes=(
                Fix("cluster.processes", f"{ratio:.2g} times as many", "a faster trainer"),
                Fix("engine.data_parallel_size", "fewer", "leaves devices for the trainer"),
            ),
            value=idle_s / step_s,
            level=None,
            options=options,
            first_step=int(records.steps[-options.window]),
        )


def _drains(view: RunView) -> bool:
    return "time/wait_drain" in view.metrics


def _median(view: RunView, name: str, window: int) -> float:
    return median(needed(view, name).finite().values[-window:])


def _sighting(
    message: str,
    *,
    name: str,
    evidence: str,
    fixes: tuple[Fix, ...],
    value: float,
    level: Level | None,
    options: Options,
    first_step: int,
) -> Sighting:
    return Sighting(
        message=message,
        evidence=(evidence,),
        causes=(Cause(name, evidence),),
        fixes=fixes,
        first_step=first_step,
        value=value,
        limit=options.share,
        level=level,
    )


RULE = Rule(
    code="PRF010",
    name="one-side-starved",
    family=Family.PERFORMANCE,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("time/wait_groups", "time/engine_idle", "time/step"),
    options=Options,
)
