"""An update changes a group of layers by a large share of their size.

## What it sees
`update/weight_ratio/<group>`, the norm of an update over the norm of the weights it changes, above
`max_ratio` in `fire` measured updates in a row. The finding stays open, because what was
overwritten is lost.

## Why it matters
Healthy fine-tuning changes weights by 1e-5 to 1e-2 of their size in an update. A change by a third
destroys what was learned before.

## Likely causes
- lr-too-high: the rate, first of all.
- update-too-large: weights that are nearly 0 by nature (a fresh adapter, a new head).

## What to do
Lower the rate; warm it up.

## Known false alarms
A freshly added head whose weights begin at 0: its first update is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import RunView, Series


class Options(RuleOptions):
    max_ratio: float = option(0.2, "Share of the weights' norm that an update may move.")
    fire: int = option(2, "Number of consecutive records that must show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    groups = view.matching("update/weight_ratio/")
    if not groups:
        yield Unknown("the metric update/weight_ratio was not logged")
        return
    found = []
    for name, ratio in groups.items():
        spell = newest_spell(ratio.values > options.max_ratio, fire=options.fire)
        if spell is not None:
            held = slice(spell.start, spell.end + 1)
            part = Series(ratio.steps[held], ratio.values[held])
            found.append((median(part.values), name, part))
    if not found:
        return
    size, name, part = max(found, key=lambda one: one[0])
    first = min(int(series.steps[0]) for _, _, series in found)
    yield Sighting(
        message=f"Updates move {name} by {size:.2g} of its own size from step {first} (limit "
        f"{options.max_ratio:g}): what the model knew is overwritten. Lower the learning rate.",
        evidence=tuple(f"update/weight_ratio/{other} {ratio:.3g}" for ratio, other, _ in found[:6]),
        causes=(Cause("lr-too-high", f"an update of {size:.2g} of the weights' norm"),),
        fixes=(Fix("trainer.lr", "a tenth of it", "smaller updates", Grade.UNSAFE),),
        first_step=first,
        last_step=int(part.steps[-1]),
        value=size,
        limit=options.max_ratio,
        # Weights that were drawn at random know nothing yet: large steps are how they learn.
        level=Level.INFO if view.setting("model.init") == "random" else None,
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
