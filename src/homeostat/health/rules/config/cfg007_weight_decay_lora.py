"""The weight decay is high for an adapter.

## What it sees
A weight decay above `max_decay` while an adapter is trained.

## Why it matters
Decay pulls an adapter towards 0, that is towards the model from which it started, and undoes what
is learned.

## Likely causes
- weight-decay-high-for-lora: a value from pretraining.

## What to do
0.01, or none.

## Known false alarms
Large adapters on little data may need a high decay; the finding is therefore only information.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import has_adapter
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_decay: float = option(0.1, "Decay that is too high for an adapter.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    decay = view.number("trainer.optimizer.weight_decay")
    if decay is None or decay <= options.max_decay or not has_adapter(view):
        return
    yield Sighting(
        message=f"A weight decay of {decay:g} on an adapter (usual: 0 to 0.01) pulls it back to "
        "its beginning. Lower it.",
        causes=(Cause("weight-decay-high-for-lora", f"weight decay {decay:g}"),),
        fixes=(Fix("trainer.optimizer.weight_decay", "0.01", "the usual value", Grade.UNSAFE),),
        value=decay,
        limit=options.max_decay,
    )


RULE = Rule(
    code="CFG007",
    name="weight-decay-high-for-lora",
    family=Family.CONFIG,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("setting:trainer.optimizer.weight_decay",),
    options=Options,
)
