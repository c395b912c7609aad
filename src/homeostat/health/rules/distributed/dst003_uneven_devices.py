"""Some devices work while others idle.

## What it sees
The utilisation of the busiest and the least busy device differ by more than `max_gap` on average
over the newest records.

## Why it matters
Some of the devices are idle: the batch is not divisible, or a part of the model is on only one of
them.

## Likely causes
- uneven-device-load: batches that do not divide by the devices, or stages that wait for each other.

## What to do
Make batch sizes multiples of the devices; see which part waits.

## Known false alarms
Trainer and engine on separate devices alternate by design; hence information only.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_gap: float = option(0.5, "Difference of utilisation that is too much.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    used = view.matching("gpu/", "/utilization")
    if len(used) < 2:
        yield Unknown("fewer than two devices were measured")
        return
    means = {name: float(series.tail(20).values.mean()) for name, series in used.items()}
    most, least = max(means, key=lambda n: means[n]), min(means, key=lambda n: means[n])
    gap = means[most] - means[least]
    if gap <= options.max_gap or min(len(series) for series in used.values()) < 5:
        return
    yield Sighting(
        message=f"Device {most} is busy {means[most]:.0%} of the time, device {least} "
        f"{means[least]:.0%}. Make batch sizes multiples of the devices, and see which one waits.",
        causes=(Cause("uneven-device-load", f"{means[most]:.0%} against {means[least]:.0%}"),),
        fixes=(
            Fix(
                "trainer.batch_rows",
                "a multiple of the devices",
                "every device gets the same work",
                Grade.UNSAFE,
            ),
        ),
        last_step=view.last_step,
        value=gap,
        limit=options.max_gap,
    )


RULE = Rule(
    code="DST003",
    name="uneven-device-load",
    family=Family.DISTRIBUTED,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    options=Options,
)
