"""A resumed run begins with an empty optimizer: its moments were not restored.

## What it sees
Our own runs count the updates that the optimizer's state has seen (`probe/optimizer_updates`): the
count is lower than it was. Of other frameworks, at the point where the log says that the run was
resumed: the loss jumps up by `sigmas` of its noise and by `min_jump` of its value, keeps most of
what was learned, and is back where it was some records later.

## Why it matters
The first updates with empty moments are as large as the rate allows, in every weight, whatever the
gradient's size: part of what was learned is undone, and warm-up and decay no longer fit.

## Likely causes
- resumed-without-optimizer-state: only the weights were saved or loaded, the optimizer's files were
  left out to save room, or a new run was started from the weights alone.

## What to do
Save and load the whole state. If it is lost, resume with a warm-up of a few hundred steps.

## Known false alarms
A run that is started from earlier weights on purpose. In other frameworks also other data after the
resumption; hence a heuristic there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.resumed import around, resumed_steps
from homeostat.health.view import Kind, RunView

_COUNT = "probe/optimizer_updates"
_NAME = "resumed-without-optimizer-state"


class Options(RuleOptions):
    sigmas: float = option(6.0, "Jump of the loss, in units of its noise.")
    min_jump: float = option(0.1, "Jump of the loss, as a share of its value.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    count = view.series(_COUNT)
    if count is not None:
        fell = np.flatnonzero(np.diff(count.values) < 0)
        if len(fell):
            at = int(fell[-1]) + 1
            yield _measured(int(count.steps[at]), *map(float, count.values[at - 1 : at + 1]))
        return
    steps = resumed_steps(view)
    if not steps or view.kind is Kind.RL:
        yield Unknown("the optimizer's updates are not counted, and no resumption is known")
        return
    found = around(view.series("train/loss"), steps[-1])
    if found is None or found.later is None:
        return
    jump = found.after - found.before
    limit = max(options.sigmas * found.noise, options.min_jump * abs(found.before))
    is_back = found.later < found.before + 0.3 * jump
    if jump > limit and is_back and found.lost_share < 0.6:
        yield _jumped(steps[-1], found.before, found.after, limit)


def _measured(step: int, was: float, now: float) -> Sighting:
    return Sighting(
        message=f"The optimizer's state has seen {now:.0f} updates at step {step}, and had seen "
        f"{was:.0f} before: the run was resumed without it. Resume from a whole checkpoint.",
        evidence=(f"{_COUNT} {was:.0f} -> {now:.0f}",),
        causes=(Cause(_NAME, f"the count of updates fell from {was:.0f} to {now:.0f}"),),
        fixes=_FIXES,
        first_step=step,
        last_step=step,
        value=now,
        limit=was,
    )


def _jumped(step: int, before: float, after: float, limit: float) -> Sighting:
    return Sighting(
        message=f"The loss jumped from {before:.4g} to {after:.4g} where the run was resumed (step "
        f"{step}) and came back since: its optimizer was empty. Load the optimizer's state, too.",
        evidence=(f"train/loss {before:.4g} -> {after:.4g} after step {step}",),
        causes=(Cause(_NAME, "a jump at the resumption that the next steps undo"),),
        fixes=_FIXES,
        first_step=step + 1,
        last_step=step + 1,
        value=after - before,
        limit=limit,
        level=Level.WARN,
        confidence=Confidence.HEURISTIC,
    )


_FIXES = (
    Fix(
        "trainer.schedule.warmup_steps",
        "as many as at the start",
        "small steps until the moments are filled again",
        Grade.UNSAFE,
    ),
    Fix(
        "",
        "false",
        "checkpoints hold the optimizer's state, too",
        Grade.SAFE,
        theirs={"transformers": "save_only_model", "axolotl": "save_only_model"},
    ),
)

RULE = Rule(
    code="CKP007",
    name=_NAME,
    family=Family.CHECKPOINT,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    options=Options,
    explains=("LRN002", "LRN003", "LRN009", "NUM008", "RWD006", "POL013"),
)
