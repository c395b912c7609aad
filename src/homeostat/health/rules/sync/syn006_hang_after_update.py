"""After a publication of weights nothing more was generated.

## What it sees
The log ends with `fire` or more lines that wait for rollouts or for the engine, the last event
before them is an update of the weights, and no step was finished after it. Or the engine itself
prints `silent` lines since an update that ended (`silent_open` since one of which only the
beginning is printed) in which requests run and no token is made.

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
from homeostat.health.log import LogLine
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.stalls import RATES, stalled
from homeostat.health.view import RunView
from homeostat.health.words import shortened


class Options(RuleOptions):
    fire: int = option(3, "Lines that wait.")
    silent: int = option(6, "Lines of an engine without a token, after an update that ended ...")
    silent_open: int = option(12, "... and after one of which only the beginning is printed.")


_WAITS = ("waiting for rollout", "waiting for batch", "waiting for generation", "still waiting",
          "waiting for engine", "waiting for inference")  # fmt: skip
_ENDS = ("weight update took", "weights updated", "weight update done", "weight update finished",
         "weight update complete", "weights synced", "weight sync done", "weight sync took",
         "finished updating weights", "updated weights to")  # fmt: skip
_UPDATES = ("updating weights", "update weights", "update_weights", "sync_weights", *_ENDS)
_DONE = ("success step", "finished step", "step done")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    update = view.log.last(*_UPDATES)
    if update is None or view.log.has("traceback"):
        return
    waits = _waits(view, update, options) or _silence(view, update, options)
    if not waits:
        return
    last = waits[-1]
    step = update.step + 1 if update.step is not None else last.step
    yield Sighting(
        message="Nothing was generated after the last update of the weights: "
        f"{len(waits)} messages say so. The engine has not answered since then; see its own "
        "log, and restart it.",
        evidence=(
            f"line {update.number}: {shortened(update.text.strip(), 160)}",
            f"line {last.number}: {shortened(last.text.strip(), 160)}",
        ),
        causes=(Cause("hang-after-weight-update", "the engine is silent since the update"),),
        fixes=(
            Fix("engine.stall_s", "600", "a silent engine is restarted sooner", Grade.SAFE),
            Fix("engine.max_restarts", "3", "a dead engine is replaced", Grade.SAFE),
        ),
        first_step=step,
        last_step=last.step,
    )


def _waits(view: RunView, update: LogLine, options: Options) -> list[LogLine]:
    """Lines that wait for the engine since the update, where no step was finished after it."""
    found = {line.number: line for text in _WAITS for line in view.log.find(text)}
    waits = [found[number] for number in sorted(found) if number > update.number]
    if len(waits) < options.fire:
        return []
    done = view.log.last(*_DONE)
    if done is not None and done.number > update.number:
        return []
    if view.last_step is not None and update.step is not None and view.last_step > update.step + 1:
        return []
    return waits


def _silence(view: RunView, update: LogLine, options: Options) -> list[LogLine]:
    """Lines of an engine that runs requests and made no token since the update."""
    lines = stalled(view)
    ended = view.log.last(*_ENDS)
    is_over = ended is not None and ended.number >= update.number
    enough = options.silent if is_over else options.silent_open
    between = [line for line in lines if line.number < update.number]
    if len(lines) < enough or len(between) > 2 or len(lines) - len(between) < enough:
        return []
    # Lines with tokens between the update and the silence: it came from elsewhere.
    rates = view.log.find(RATES)
    went_on = [line for line in rates if update.number < line.number < lines[0].number]
    return [] if len(went_on) > 2 else lines


RULE = Rule(
    code="SYN006",
    name="hang-after-weight-update",
    family=Family.SYNC,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("log",),
    options=Options,
    explains=("GEN007", "PRF005", "PRF006", "PRF009"),
)
