"""The run stopped before its last step.

## What it sees
A warning where something killed it: the kernel, a scheduler, a time limit. Information where a
person or a signal stopped it, where it ended by itself before the planned number of steps (early
stopping), and where the log just ends: the run may still be running, or the log was cut.

## Why it matters
What it has learned is what the newest checkpoint holds; a schedule that was made for all steps has
not come to its end.

## Likely causes
- stopped-early: the log's own words, or its last step.

## What to do
Resume from the newest checkpoint. Find out from the scheduler (sacct, kubectl describe) and the
kernel's log (dmesg) what ended it.

## Known false alarms
A log that was cut by hand, or copied while the run was active: information, never a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule
from homeostat.health.view import RunView
from homeostat.health.vitals import End, ending_of
from homeostat.health.words import shortened


def check(view: RunView, _: object) -> Iterator[Sighting]:
    ending, step, total = ending_of(view), view.last_step, view.total_steps
    if step is None:
        return
    ended = ending.how in (End.KILLED, End.STOPPED) or ending.is_early
    if ending.how is not End.OPEN and not ended:
        return
    of, words = f" of {total:,}" if total else "", ending.words
    quote = ending.line
    yield Sighting(
        message=f"The newest step is {step:,}{of}: {words}. What was learned is in the newest "
        "checkpoint.",
        evidence=(f"line {quote.number}: {shortened(quote.text.strip(), 300)}",) if quote else (),
        causes=(Cause("stopped-early", words),),
        fixes=(Fix("", "", "go on from the newest checkpoint"),) if ended else (),
        first_step=step,
        last_step=step,
        value=float(step),
        limit=float(total) if total else None,
        level=Level.WARN if ending.how is End.KILLED else None,
    )


RULE = Rule(
    code="VIT003",
    name="stopped-early",
    family=Family.DISTRIBUTED,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    # A run that is watched live has not stopped: only what was read is judged.
    needs=("fact:sources",),
    yields_to=("ERR", "VIT001", "VIT002", "VIT006"),
)
