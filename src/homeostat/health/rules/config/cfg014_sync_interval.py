"""Weights are published rarely, and nothing corrects for the age of the samples.

## What it sees
A sync interval above `max_interval` steps while the importance correction is off.

## Why it matters
Samples of a policy that is several updates old are trained on as if they were fresh: the gradient
is biased, and the more so the longer the interval. A longer interval never helps against this.

## Likely causes
- sync-interval-without-correction: publishing was made rarer to save time.

## What to do
Publish every step, or switch the correction on.

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
    if interval is None or interval <= options.max_interval:
        return
    ours = view.framework.name == "homeostat" and "algorithm.correction" in view.settings
    off = ours and view.settings["algorithm.correction"] is None
    switch = raw(view, "vllm_importance_sampling_correction", "use_tis", "rollout_is")
    if not (off or is_false(switch)):
        return
    yield Sighting(
        message=f"Weights are published every {interval:g} steps and the age of the samples is not "
        "corrected for. Publish every step, or switch the correction on.",
        causes=(Cause("sync-interval-without-correction", f"{interval:g} steps old, uncorrected"),),
        fixes=(
            Fix("sync.interval", "1", "samples of the policy that is trained", Grade.UNSAFE),
            Fix("algorithm.correction.weight.type", "token", "weighs old samples", Grade.UNSAFE),
        ),
        value=interval,
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
