"""After a publication of weights nothing more was generated.

## What it sees
The log ends with `fire` or more lines that wait for rollouts or for the engine, the last event
before them is an update of the weights, and no step was finished after it.

## Why it matters
The engine accepts requests and answers none: the run will wait for ever.

## Likely causes
- hang-after-weight-update: the engine's worker died or is stuck while loading (adapters of models
  with experts, a collective that one rank did not join).

## What to do
Look at the engine's own log after the reload, restart it, publish in full.

## Known false alarms
A first generation after start-up that compiles for minutes; there no update stands before it.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView


class Options(RuleOptions):
    fire: int = option(3, "Lines that wait.")


_WAITS = ("waiting for rollout", "waiting for batch", "waiting for generation", "still waiting",
          "waiting for engine", "waiting for inference")  # fmt: skip
_UPDATES = ("updating weights", "update weights", "update_weights", "weight update took",
            "weights updated", "weight update done", "sync_weights")  # fmt: skip
_DONE = ("success step", "finished step", "step done")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    update = view.log.last(*_UPDATES)
    if update is None:
        return
    waits = [line for text in _WAITS for line in view.log.find(text) if line.number > update.number]
    if len({line.number for line in waits}) < options.fire or view.log.has("traceback"):
        return
    done = view.log.last(*_DONE)
    if done is not None and done.number > update.number:
        return
    if view.last_step is not None and update.step is not None and view.last_step > update.step + 1:
        return
    last = max(waits, key=lambda line: line.number)
    step = update.step + 1 if update.step is not None else last.step
    yield Sighting(
        message="Nothing was generated after the last update of the weights: "
        f"{len(waits)} messages wait for it. The engine does not answer since then; see its own "
        "log, and restart it.",
        evidence=(
            f"line {update.number}: {update.text.strip()[:160]}",
            f"line {last.number}: {last.text.strip()[:160]}",
        ),
        causes=(Cause("hang-after-weight-update", "the engine is silent since the update"),),
        fixes=(
            Fix("engine.stall_s", "600", "a silent engine is restarted sooner", Grade.SAFE),
            Fix("engine.max_restarts", "3", "a dead engine is replaced", Grade.SAFE),
        ),
        first_step=step,
        last_step=last.step,
    )


RULE = Rule(
    code="SYN006",
    name="hang-after-weight-update",
    family=Family.SYNC,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("log",),
    options=Options,
)
