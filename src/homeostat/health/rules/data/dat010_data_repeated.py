"""The run makes many passes over the data.

## What it sees
More than `max_epochs` passes over the rows, done or asked for.

## Why it matters
After a few passes a model repeats its rows; in RL, prompts that were solved long ago fill the
batches.

## Likely causes
- data-repeated: little data for many steps.

## What to do
Stop earlier, or find more data. Watch the evaluation.

## Known false alarms
Tiny tasks that are learned by heart on purpose; hence information only.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_epochs: float = option(5.0, "Passes over the rows that are usual.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    epochs = needed(view, "epoch")
    done = max(epochs.latest, view.number("trainer.epochs") or 0.0)
    if done <= options.max_epochs:
        return
    yield Sighting(
        message=f"The rows are passed over {done:.3g} times (usual: up to "
        f"{options.max_epochs:g}): the model will know them by heart. Watch the evaluation.",
        causes=(Cause("data-repeated", f"{done:.3g} passes over the same rows"),),
        fixes=(Fix("trainer.epochs", "3", "fewer passes", Grade.UNSAFE),),
        first_step=int(epochs.steps[0]),
        last_step=int(epochs.steps[-1]),
        value=done,
        limit=options.max_epochs,
    )


RULE = Rule(
    code="DAT010",
    name="data-repeated",
    family=Family.DATA,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("epoch",),
    kinds=(Kind.SFT, Kind.PREFERENCE, Kind.REWARD_MODEL),
    options=Options,
)
