"""Memory ran out, and steps were retried with smaller micro-batches.

## What it sees
Our events oom_retry: one is information, `repeated` are a warning.

## Why it matters
Each retry takes the time of a step. The gradient is the same, so nothing is lost but time; the
token budget is too high for this device.

## Likely causes
- oom-retries: trainer.max_tokens_per_device is too high.

## What to do
Set the budget to the value that the event reports in the end.

## Known false alarms
None: they are counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView


class Options(RuleOptions):
    repeated: int = option(1, "Number of retries from which on it is a warning.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    found = view.events_of("oom_retry")
    if not found:
        return
    now = found[-1].fields.get("tokens_now")
    yield Sighting(
        message=f"Memory ran out {len(found)} time(s); micro-batches now have "
        f"{now if now is not None else 'fewer'} tokens. Set trainer.max_tokens_per_device to that.",
        evidence=tuple(str(event.fields.get("error", ""))[:120] for event in found[:2]),
        causes=(Cause("oom-retries", "the token budget is too high for this device"),),
        fixes=(
            Fix("trainer.max_tokens_per_device", str(now or "half of it"), "what fits", Grade.SAFE),
        ),
        first_step=found[0].step,
        last_step=found[-1].step,
        value=float(len(found)),
        limit=float(options.repeated),
        level=Level.WARN if len(found) >= options.repeated else Level.INFO,
    )


RULE = Rule(
    code="MEM005",
    name="oom-retries",
    family=Family.MEMORY,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("events",),
    options=Options,
)
