"""The engine has running requests but produces no tokens.

## What it sees
The newest `fire` lines or more that the engine prints of its rates show 0 tokens per second, read
or made, while requests run, and no step is finished in the meantime.

## Why it matters
These requests will never finish: the run waits forever, or until a time limit ends it.

## Likely causes
- engine-step-timeout: a step of the engine's workers never came back: a rank that died or waits in
  a collective, a request that cannot be scheduled, an engine that was paused and not resumed.

## What to do
See the workers' own logs and their stacks (py-spy dump), then restart the engine.

## Known false alarms
A step that compiles for minutes. A slow update of the weights, unless the log mentions it.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.stalls import stalled
from homeostat.health.view import RunView
from homeostat.health.words import shortened

_BUSY = (
    "compiling",
    "torch.compile",
    "capturing",
    "capture cuda graph",
    "autotun",
    "loading model",
)


class Options(RuleOptions):
    fire: int = option(12, "Lines in a row without a token.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    lines = stalled(view)
    if len(lines) < options.fire:
        return
    if any(view.log.near(lines[0], word, lines=40) for word in _BUSY):
        return
    yield Sighting(
        message=f"The engine made no token in its last {len(lines)} reports although requests run "
        f"(since line {lines[0].number}). Look at its workers' logs and stacks, and restart it.",
        evidence=tuple(
            f"line {x.number}: {shortened(x.text.strip(), 160)}" for x in (lines[0], lines[-1])
        ),
        causes=(Cause("engine-step-timeout", "requests run, and no token is made"),),
        fixes=(
            Fix("engine.stall_s", "600", "a silent engine is restarted sooner", Grade.SAFE),
            Fix("engine.max_restarts", "3", "a dead engine is replaced", Grade.SAFE),
        ),
        first_step=lines[0].step,
        last_step=lines[-1].step,
        value=float(len(lines)),
        limit=float(options.fire),
    )


RULE = Rule(
    code="GEN007",
    name="engine-step-timeout",
    family=Family.GENERATION,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("log",),
    options=Options,
    explains=("PRF005", "PRF006", "PRF009"),
)
