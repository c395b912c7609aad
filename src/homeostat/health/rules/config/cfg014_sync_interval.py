"""Samples come from old weights, and nothing corrects for their age.

## What it sees
A sync interval above `max_interval` steps, or groups that are sampled as far ahead of the trainer
(rollout.max_staleness), while the importance correction is off.

## Why it matters
Samples of a policy that is several updates old are trained on as if they were fresh: the gradient
is biased, and the more so the longer the interval. A longer interval never helps against this.

## Likely causes
- sync-interval-without-correction: to save time, weights are published less often, or sampling runs
  further ahead.

## What to do
Publish every step and sample fewer steps ahead, or switch the correction on.

## Known false alarms
Very small learning rates, at which the policy hardly moves in between.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import is_false, raw
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_interval: float = option(4.0, "Steps between publications that need no correction.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    interval = view.number("sync.interval")
    ahead = view.number("rollout.max_staleness") or 0.0
    if interval is None or max(interval, ahead) <= options.max_interval:
        return
    ours = view.framework.name == "homeostat" and "algorithm.correction" in view.settings
    off = ours and view.settings["algorithm.correction"] is None
    switch = raw(view, "vllm_importance_sampling_correction", "use_tis", "rollout_is")
    if not (off or is_false(switch)):
        return
    by_interval = interval > options.max_interval
    setting = "sync.interval" if by_interval else "rollout.max_staleness"
    age = interval if by_interval else ahead
    what = "published every" if by_interval else "behind the trainer by up to"
    yield Sighting(
        message=f"Weights of the engine are {what} {age:g} steps and the age of the samples is not "
        f"corrected for. Lower {setting}, or switch the correction on.",
        causes=(Cause("sync-interval-without-correction", f"{age:g} steps old, uncorrected"),),
        fixes=(
            Fix(setting, "1", "samples of the policy that is trained", Grade.UNSAFE),
            Fix("algorithm.correction.weight.type", "token", "weighs old samples", Grade.UNSAFE),
        ),
        value=age,
        limit=options.max_interval,
    )


RULE = Rule(
    code="CFG014",
    name="sync-interval-without-correction",
    family=Family.CONFIG,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("setting:sync.interval",),
    kinds=(Kind.RL,),
    options=Options,
)
