"""Devices are busy for little of the time, or use little of their arithmetic.

## What it sees
Mean utilisation of all devices below `min_share`, or the share of peak arithmetic below `min_mfu`,
over the newest records.

## Why it matters
Either the host is the bottleneck (data, rewards, Python), or batches are too small.

## Likely causes
- gpu-idle: the device waits.
- mfu-low: it works, on pieces that are too small.

## What to do
See time/data_wait, time/reward and sync/seconds; then raise the tokens per micro-batch.

## Known false alarms
Short runs and tiny models; hence information only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.series.medians import median
from homeostat.health.view import RunView


class Options(RuleOptions):
    min_share: float = option(0.3, "Share of the time that devices should be busy.")
    min_mfu: float = option(0.05, "Share of the peak arithmetic that should be used.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    used, mfu = view.matching("gpu/", "/utilization"), view.series("throughput/mfu")
    if not used and mfu is None:
        yield Unknown("neither utilisation nor arithmetic was logged")
        return
    busy = [float(s.tail(20).values.mean()) for s in used.values() if len(s) >= 5]
    if busy and float(np.mean(busy)) < options.min_share:
        share = float(np.mean(busy))
        yield _sighting(view, "gpu-idle", f"devices are busy {share:.0%} of the time", share)
    elif mfu is not None and len(mfu) >= 5:
        share = median(mfu.tail(20).finite().values) if len(mfu.finite()) else 1.0
        if 0 < share < options.min_mfu:
            yield _sighting(view, "mfu-low", f"{share:.1%} of the peak arithmetic is used", share)


def _sighting(view: RunView, name: str, why: str, value: float) -> Sighting:
    return Sighting(
        message=f"Little use is made of the devices: {why}. See which part of a step waits, and "
        "use larger micro-batches.",
        causes=(Cause(name, why),),
        fixes=(
            Fix(
                "trainer.max_tokens_per_device",
                "more",
                "larger micro-batches keep the GPU busy",
                Grade.SAFE,
            ),
        ),
        last_step=view.last_step,
        value=value,
    )


RULE = Rule(
    code="PRF008",
    name="gpu-idle",
    family=Family.PERFORMANCE,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    options=Options,
)
