"""The run ended in an exception that no rule recognises.

## What it sees
The last traceback of the log, with no step after it. Where a rule knows its words, or the user's
own code raised (VIT001, VIT006), that is said in place of this.

## Why it matters
The run is dead, whatever its metrics look like. The verdict is then "not known", never "no
illness", and the exit code is 1.

## Likely causes
- ended-in-exception: the exception's own words say what is known.

## What to do
Read the exception and the frame that raised it. Resume from the newest checkpoint.

## Known false alarms
A traceback that was caught in the last steps of a log that was cut there.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Level, Sighting
from homeostat.health.rule import Rule
from homeostat.health.view import RunView
from homeostat.health.vitals import End, ending_of
from homeostat.health.words import shortened


def check(view: RunView, _: object) -> Iterator[Sighting]:
    ending = ending_of(view)
    if ending.how is not End.EXCEPTION:
        return
    found = ending.traceback
    if found is None:
        yield Sighting(
            message=f"The run is dead: {shortened(ending.words, 300)}.",
            causes=(Cause("ended-in-exception", "the run's own event says so"),),
            first_step=view.last_step,
        )
        return
    yield Sighting(
        message=f"The run is dead: it ended in {shortened(found.error, 300)}. No rule knows these "
        f"words. It was raised in {found.frames[-1]}.",
        evidence=(
            f"line {found.start.number}: {shortened(found.start.text.strip(), 300)}",
            f"line {found.end.number}: {shortened(found.end.text.strip(), 300)}",
        ),
        causes=(Cause("ended-in-exception", shortened(found.error, 200)),),
        first_step=found.end.step,
        last_step=found.end.step,
    )


RULE = Rule(
    code="VIT002",
    name="ended-in-exception",
    family=Family.CONFIG,
    # What it is is not known: the verdict says so, and the exit code.
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("log",),
    explains=("ERR140",),
    yields_to=("ERR", "VIT001", "VIT006"),
)
