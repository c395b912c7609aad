"""Samples come from weights that are too old to learn from.

## What it sees
Trainer and engine differ by more than `max_gap` nats per token, or the effective sample size is
below `min_ess`, or both ends of the importance ratio are far out, in `fire` of the newest `window`
records, and the weights that sampled are known to be older than those that learn.

## Why it matters
Off-policy samples are weighted by how likely the current policy would have drawn them. If that is
almost 0 for most of them, a few samples decide the update.

## Likely causes
- stale-policy: weights are published too seldom for the pace of learning, or too many updates are
  made per rollout.
- lr-too-high: a few updates already move the policy far away.

## What to do
Publish more often: a SMALLER sync.interval, at best one publication per step. (Advice to raise the
interval against low ratios is wrong.) If groups are sampled ahead of the trainer, lower
rollout.max_staleness. Or learn more slowly, or mask samples that are
too far off (`algorithm.correction.off_policy_mask`).

## Known false alarms
The smallest ratio of a batch is an outlier by nature and says nothing alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.offpolicy.gap import staleness
from homeostat.health.rules.signs import newest, trend
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    max_gap: float = option(0.3, "Distance of log-probs, in nats, that is too much.")
    min_ess: float = option(0.3, "Share of the sample that the weights leave, at least.")
    fire: int = option(8, "Number of records that must show it ...")
    window: int = option(10, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    age = staleness(view)
    gap, ess = view.series("sampling/sampling_logp_difference/mean"), view.series("sampling/ess")
    if age <= 0.0:
        return
    for name, series, held in (
        ("trainer and engine differ by", gap, _above(gap, options.max_gap)),
        ("the share of the sample that counts is", ess, _above(ess, options.min_ess, below=True)),
    ):
        spell = (
            newest_spell(held, fire=options.fire, window=options.window, clear=options.window)
            if held is not None
            else None
        )
        if series is not None and spell is not None and spell.is_open:
            if _fresh_differ(view, int(series.steps[spell.start]), options):
                return
            yield _sighting(view, name, series.since(int(series.steps[spell.start])), age, options)
            return


def _fresh_differ(view: RunView, first: int, options: Options) -> bool:
    """Tokens of the newest weights differ as much: their age is not the reason."""
    fresh = view.series("sampling/by_age/0/logp_difference")
    later = fresh.since(first).finite() if fresh is not None else None
    return later is not None and len(later) > 0 and float(later.values.max()) > options.max_gap


def _above(series: Series | None, limit: float, *, below: bool = False) -> np.ndarray | None:
    if series is None:
        return None
    return series.values < limit if below else series.values > limit


def _fresher(view: RunView) -> tuple[str, Fix]:
    """Say which setting gives fresher samples: where they are sampled ahead, by how much."""
    ahead, interval = view.number("rollout.max_staleness"), view.number("sync.interval")
    if ahead is not None and ahead > 0:
        fix = Fix("rollout.max_staleness", f"{int(ahead / 2)}", "fresher samples", Grade.UNSAFE)
        return "Sample fewer steps ahead: a smaller rollout.max_staleness.", fix
    fix = Fix(
        "sync.interval",
        f"{max(1, int((interval or 2) / 2))}",
        "smaller: fresher samples",
        Grade.UNSAFE,
    )
    return "Publish the weights more often: a smaller sync.interval.", fix


def _sighting(view: RunView, name: str, series: Series, age: float, options: Options) -> Sighting:
    value = median(series.finite().values)
    reward = trend(view.series("reward"))
    lowest = newest(view, "sampling/importance_sampling_ratio/min")
    evidence = [f"{name} {value:.3g}", f"the samples' policy is {age:.2g} steps old"]
    if lowest is not None:
        evidence.append(f"smallest importance ratio {lowest:.2g}")
    advice, fresher = _fresher(view)
    return Sighting(
        message=f"Since step {series.steps[0]} {name} {value:.3g}, with samples {age:.2g} steps "
        f"old. {advice}",
        evidence=tuple(evidence),
        causes=(
            Cause("stale-policy", f"the samples' policy is {age:.2g} steps old"),
            Cause("lr-too-high", "a few updates already carry far"),
        ),
        fixes=(
            fresher,
            Fix("algorithm.correction.off_policy_mask", "0.5", "drops the worst", Grade.UNSAFE),
            Fix("trainer.lr", "a half", "less drift between publications", Grade.UNSAFE),
        ),
        first_step=int(series.steps[0]),
        last_step=int(series.steps[-1]),
        value=value,
        limit=options.max_gap,
        # While the reward rises the run pays for staleness with efficiency alone.
        level=Level.INFO if reward is not None and reward.rises else None,
    )


RULE = Rule(
    code="OFF005",
    name="stale-policy",
    family=Family.OFFPOLICY,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("sampling/sampling_logp_difference/mean|sampling/ess",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("OFF006",),
)
