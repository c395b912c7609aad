"""A run over several epochs has no held-out rows, so overfitting would go unnoticed.

## What it sees
An SFT run with at least `min_epochs` passes over its data and without an evaluation loss.

## Why it matters
Training loss falls in any case. Only rows that are not trained on show whether the model gets
better or just memorises its rows.

## Likely causes
- eval-missing: no validation data is set.

## What to do
Hold a few hundred rows out.

## Known false alarms
Runs that are evaluated elsewhere; hence information only.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    min_epochs: float = option(1.5, "Passes over the data without an evaluation.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    epochs = needed(view, "epoch")
    if epochs.latest < options.min_epochs or view.series("eval/loss") is not None:
        return
    yield Sighting(
        message=f"The data was passed over {epochs.latest:.2g} times and nothing was ever "
        "evaluated: overfitting would not show. Hold some rows out.",
        causes=(Cause("eval-missing", "no evaluation loss in the log"),),
        fixes=(Fix("data.validation_share", "0.02", "holds rows out", Grade.UNSAFE),),
        first_step=int(epochs.steps[0]),
        last_step=int(epochs.steps[-1]),
        value=epochs.latest,
        limit=options.min_epochs,
    )


RULE = Rule(
    code="LRN018",
    name="eval-missing",
    family=Family.LEARNING,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("epoch",),
    kinds=(Kind.SFT,),
    options=Options,
)
