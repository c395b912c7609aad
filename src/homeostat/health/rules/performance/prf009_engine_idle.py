"""The engine gets only a few requests at a time, where it had many before, and is slow because of
it.

## What it sees
From one record on, the tokens per second are below `share` of what they were, and the engine runs
less than a quarter of the requests that it ran before, while none waits. Answers are about as long
as before.

## Why it matters
The engine could do far more: whatever hands it requests does not. Steps take many times as long.

## Likely causes
- rollout-underutilised: requests are no longer handed out as others end (after a pause for new
  weights, a lost worker, a limit that counts requests which have ended).

## What to do
Check the program that sends the requests, and how many it may have open. Restart it: if the rate
recovers, it did not count finished requests as finished.

## Known false alarms
The tail of a round, when only the longest answers are left: it ends with the round and does not
last for several records. The log of a server that gets no request at all any more counts only if it
also has the metrics of a training.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import RunView, Series


class Options(RuleOptions):
    share: float = option(0.2, "Share of the first rate that is a collapse.")
    fire: int = option(3, "Number of records before, and after, that must show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    names = ("throughput/tokens_per_s", "throughput/tokens_per_s_per_device", "engine/tokens_per_s")
    rate = needed(view, *names).finite()
    at = _collapse(rate, options)
    if at is None:
        return
    step = int(rate.steps[at])
    idle = _idle(view, step)
    if not idle or _lengths_changed(view, step):
        return
    first, last = median(rate.values[:at]), median(rate.values[at:])
    yield Sighting(
        message=f"Throughput fell from {first:.4g} to {last:.4g} tokens/s at step {step} and stays "
        f"there: {idle}. Check the part that submits requests, and how many "
        "requests it may have in flight.",
        evidence=(f"{last / first:.0%} of what it was", idle),
        causes=(Cause("rollout-underutilised", idle),),
        fixes=(
            Fix("engine.max_concurrency", "what it was", "more answers at a time", Grade.SAFE),
            Fix("rollout.prompts_per_step", "more", "more to do at a time", Grade.UNSAFE),
        ),
        first_step=step,
        last_step=int(rate.steps[-1]),
        value=last,
        limit=options.share * first,
    )


def _collapse(rate: Series, options: Options) -> int | None:
    """The record from which on the rate is a fraction of what it was, to the end."""
    if len(rate) < 2 * options.fire:
        return None
    base = median(rate.values[: options.fire])
    low = rate.values < options.share * base
    if base <= 0.0 or low.all() or not low[-options.fire :].all():
        return None
    at = int(np.flatnonzero(~low)[-1]) + 1
    return at if at >= options.fire else None


def _idle(view: RunView, step: int) -> str:
    """Return the evidence that the engine has little to do; "" if there is none."""
    running, waiting = needed(view, "engine/running"), view.series("engine/waiting")
    was, now = running.before(step).finite().values, running.since(step).finite().values[1:]
    if not len(was) or not len(now) or median(now) > 0.25 * median(was):
        return ""
    if not now.any() and view.series("train/loss", "grad_norm", "reward") is None:
        # The log of a server alone: its clients have what they wanted.
        return ""
    queue = waiting.since(step).finite().values if waiting is not None else np.zeros(0)
    if len(queue) and median(queue) > 0.5 * median(now):
        return ""
    return (
        f"the engine runs {median(now):.0f} requests at a time, {median(was):.0f} before, "
        "and none waits"
    )


def _lengths_changed(view: RunView, step: int) -> bool:
    """Return whether answers are so much longer or shorter that the rate may follow from it."""
    lengths = view.series("completions/mean_length")
    if lengths is None:
        return False
    was, now = lengths.before(step).finite().values, lengths.since(step).finite().values
    if not len(was) or not len(now):
        return False
    return not 0.5 < median(now) / max(median(was), 1e-9) < 2.0


RULE = Rule(
    code="PRF009",
    name="rollout-underutilised",
    family=Family.PERFORMANCE,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=(
        "throughput/tokens_per_s|throughput/tokens_per_s_per_device|engine/tokens_per_s",
        "engine/running",
    ),
    options=Options,
    explains=("PRF002", "PRF005", "PRF006"),
)
