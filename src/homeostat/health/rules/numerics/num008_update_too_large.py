"""An update changes a group of layers by a large share of their size.

## What it sees
`update/weight_ratio/<group>`, the norm of an update over the norm of the weights it changes, above
`max_ratio` in `fire` measured updates in a row, the first ones of the run left out.

## Why it matters
Healthy fine-tuning moves weights by 1e-5 to 1e-2 of their size in an update. A third of it destroys
what was learned before.

## Likely causes
- lr-too-high: the rate, first of all.
- update-too-large: weights that are nearly 0 by nature (a fresh adapter, a new head).

## What to do
Lower the rate; warm it up.

## Known false alarms
A freshly added head or adapter whose weights begin at 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, option
from homeostat.health.view import RunView
from homeostat.health.windows import newest_spell


@dataclass(frozen=True)
class Options:
    max_ratio: float = option(0.3, "Share of the weights' norm that an update may move.")
    skip: int = option(2, "First records that are left out.")
    fire: int = option(2, "Records in a row that must show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    groups = view.matching("update/weight_ratio/")
    if not groups:
        yield Unknown("the metric update/weight_ratio was not logged")
        return
    for name, ratio in groups.items():
        late = ratio.since(int(ratio.steps[min(options.skip, len(ratio) - 1)]))
        spell = newest_spell(late.values > options.max_ratio, fire=options.fire)
        if spell is None or not spell.is_open:
            continue
        size = float(np.median(late.values[spell.start :]))
        first = int(late.steps[spell.start])
        yield Sighting(
            message=f"Updates move {name} by {size:.2g} of its own size since step {first} (limit "
            f"{options.max_ratio:g}): what the model knew is overwritten. Lower the learning rate.",
            evidence=(f"update/weight_ratio/{name} {size:.3g}",),
            causes=(Cause("lr-too-high", f"an update of {size:.2g} of the weights' norm"),),
            fixes=(Fix("trainer.lr", "a tenth of it", "smaller updates", Grade.UNSAFE),),
            first_step=first,
            last_step=int(late.steps[-1]),
            value=size,
            limit=options.max_ratio,
            subject=name,
        )


RULE = Rule(
    code="NUM008",
    name="update-too-large",
    family=Family.NUMERICS,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    options=Options,
)
