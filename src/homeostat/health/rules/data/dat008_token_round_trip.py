"""Tokens that are trained are not the tokens that were sampled.

## What it sees
`probe/round_trip_bad`, the number of an update's rows whose tokens are not a sample's prompt and
completion, above 0.

## Why it matters
The gradient raises the probability of tokens that nobody chose, by a reward that others earned.
Log-probs of engine and trainer are compared at the wrong places.

## Likely causes
- token-round-trip-broken: text was decoded and tokenised again on the way, or rows were mixed up.

## What to do
Pass token ids from the engine to the trainer. In our own runs this can only be a bug: please report
it with the journal of that step.

## Known false alarms
None known: ids are compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import needed
from homeostat.health.view import Kind, RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    bad = needed(view, "probe/round_trip_bad")
    at = np.flatnonzero(bad.values > 0)
    if not len(at):
        return
    first = int(bad.steps[at[0]])
    yield Sighting(
        message=f"{bad.values[at[-1]]:.0f} rows of an update hold other tokens than were sampled, "
        f"first at step {first}: rewards go to tokens that nobody chose. Stop the run.",
        evidence=(f"probe/round_trip_bad above 0 in {len(at)} of {len(bad)} records",),
        causes=(Cause("token-round-trip-broken", "token ids differ between engine and trainer"),),
        fixes=(Fix("rollout.keep_journal", "true", "keeps the rows to look at"),),
        first_step=first,
        last_step=int(bad.steps[at[-1]]),
        value=float(bad.values[at].max()),
        limit=0.0,
    )


RULE = Rule(
    code="DAT008",
    name="token-round-trip-broken",
    family=Family.DATA,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("probe/round_trip_bad",),
    kinds=(Kind.RL,),
)
