"""Rows that are held out are also trained on.

## What it sees
The share of held-out rows (in RL: prompts) that occur among the training rows is above `max_share`;
from `warn_share` on it is a warning. Our own runs compare them when they start.

## Why it matters
An evaluation on rows that were trained on measures memorisation. Its loss falls while the model
gets no better at anything new, so overfitting, the best checkpoint and early stopping are all
judged wrongly.

## Likely causes
- validation-overlap: the same file, or the same rows twice in the source, on both sides.

## What to do
Name another file under data.validation, or remove copies from the source before
data.validation_share splits it.

## Known false alarms
Short prompts of a small task (sorting five digits) repeat by chance.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(0.1, "Largest share of held-out rows that may be trained on, too.")
    warn_share: float = option(0.3, "Share from which on it is a warning.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    share = _compared(view)
    if share is None:
        yield Unknown("nothing compared the held-out rows with the training rows")
        return
    if share <= options.max_share:
        return
    yield Sighting(
        message=f"{share:.0%} of the held-out rows are also trained on (limit "
        f"{options.max_share:.0%}): their score will not show overfitting. Hold out other rows.",
        evidence=(f"validation_overlap {share:.2f}",),
        causes=(Cause("validation-overlap", f"{share:.0%} of the held-out rows occur in both"),),
        fixes=(Fix("data.validation", "rows of another file", "an honest evaluation"),),
        first_step=1 if view.metrics else None,
        value=share,
        limit=options.max_share,
        level=Level.INFO if share < options.warn_share else None,
    )


def _compared(view: RunView) -> float | None:
    """Return the share that the run's start or the preflight measured; None if nothing did."""
    events = view.events_of("rows_compared")
    found = (events[-1].fields if events else view.facts).get("validation_overlap")
    return float(found) if isinstance(found, int | float) else None


RULE = Rule(
    code="DAT011",
    name="validation-overlap",
    family=Family.DATA,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    options=Options,
)
