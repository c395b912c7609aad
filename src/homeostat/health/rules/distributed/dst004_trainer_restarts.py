"""Ranks of the trainer are lost and started again from the last checkpoint.

## What it sees
Our events trainer_restarted: one is information, `repeated` are a warning. The evidence is the
error of the last one: which rank died of what, or which one lags, and in which collective.

## Why it matters
Each restart repeats the updates since the last checkpoint. Nothing is lost, but the same cause will
end the rank again.

## Likely causes
- trainer-ranks-lost: the machine is about to fail, memory runs out, or a rank cannot process its
  rows.
- straggler-rank: the rank is only slow, and the deadline is shorter than a call takes.

## What to do
Read which rank it was. If it is always the same one, look at its machine; if it is always the same
step, look at the rows of that step. Save more often while the cause is unknown.

## Known false alarms
None: they are counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView
from homeostat.health.words import counted, shortened


class Options(RuleOptions):
    repeated: int = option(2, "Number of restarts from which on it is a warning.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    found = view.events_of("trainer_restarted")
    if not found:
        return
    errors = [str(event.fields.get("error", "")).strip() for event in found]
    lines = errors[-1].splitlines()
    # A report on a hang says which rank lags; otherwise the first line says which one died.
    telling = next((line for line in lines if " lags: " in line), lines[0] if lines else "")
    hung = [error for error in errors if "no answer from rank" in error]
    causes = [Cause("trainer-ranks-lost", shortened(telling, 160) or "a rank was lost")]
    if hung:
        causes.append(Cause("straggler-rank", f"{len(hung)} of {len(found)} were deadlines"))
    repeated_from = {event.fields.get("from_step") for event in found}
    yield Sighting(
        message=f"The trainer's ranks were lost and restarted {counted(len(found), 'time')}, last "
        f"at step {found[-1].step}, from {counted(len(repeated_from), 'checkpoint')}. Find out "
        "which rank it was.",
        evidence=(shortened(telling, 160),) if telling else (),
        causes=tuple(causes),
        fixes=(
            Fix(
                "checkpoint.interval_steps",
                "fewer",
                "less work is repeated after a restart",
                Grade.SAFE,
            ),
            Fix(
                "cluster.timeout_s",
                "longer",
                "if the ranks are only slow and none hangs",
                Grade.SAFE,
            ),
        ),
        first_step=found[0].step,
        last_step=found[-1].step,
        value=float(len(found)),
        limit=float(options.repeated),
        level=Level.WARN if len(found) >= options.repeated else Level.INFO,
    )


RULE = Rule(
    code="DST004",
    name="trainer-ranks-lost",
    family=Family.DISTRIBUTED,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("events",),
    options=Options,
)
