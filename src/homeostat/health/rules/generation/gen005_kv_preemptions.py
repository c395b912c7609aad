"""The engine preempts requests for lack of cache, and computes them again.

## What it sees
The counter of preemptions grows in `fire` of the newest `window` records, by more than `limit` of
a step's samples.

## Why it matters
Each preempted request loses its cached keys and values, so its tokens are computed twice. The
samples are the same, but the step is slower.

## Likely causes
- kv-preemptions: more requests at one time than the cache has room for.

## What to do
Give the engine more memory, or let it sample fewer completions at one time.

## Known false alarms
A few at the start of a step cost little.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import samples_per_step
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    limit: float = option(0.1, "Preempted requests, as a share of a step's samples.")
    fire: int = option(3, "Number of records that must show it ...")
    window: int = option(5, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    counter, samples = view.series("engine/preemptions"), samples_per_step(view)
    assert counter is not None, "needs says so"
    grown = np.maximum(np.diff(counter.values, prepend=counter.values[:1]), 0.0)
    steps = np.maximum(np.diff(counter.steps, prepend=counter.steps[:1] - 1), 1)
    per_step = grown / steps
    limit = options.limit * samples if samples is not None else 1.0
    spell = newest_spell(per_step > limit, fire=options.fire, window=options.window, clear=4)
    if spell is None or not spell.is_open:
        return
    value, first = (
        float(per_step[spell.start : spell.end + 1].mean()),
        int(counter.steps[spell.start]),
    )
    yield Sighting(
        message=f"The engine preempts {value:.4g} requests per step since step {first}, because "
        "its cache is full. Give it more memory or lower engine.max_concurrency.",
        evidence=(f"engine/preemptions {counter.latest:.0f} in all",),
        causes=(
            Cause("kv-preemptions", "the cache is too small for the requests that run at one time"),
        ),
        fixes=(
            Fix(
                "engine.max_concurrency", "a half", "fewer sequences share the KV cache", Grade.SAFE
            ),
            Fix("engine.memory_share", "larger", "more memory for the KV cache", Grade.SAFE),
        ),
        first_step=first,
        last_step=int(counter.steps[spell.end]),
        value=value,
        limit=limit,
        level=None if samples is not None else Level.INFO,
    )


RULE = Rule(
    code="GEN005",
    name="kv-preemptions",
    family=Family.GENERATION,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("engine/preemptions",),
    kinds=(Kind.RL,),
    options=Options,
)
