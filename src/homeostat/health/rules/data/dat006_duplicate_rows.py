"""The data contains the same rows many times.

## What it sees
The fact `duplicate_rows`, the share of rows whose tokens equal those of an earlier row, above
`max_share`. If rows were not counted, the prompts of the completions that were kept are compared. A
step draws each of its prompts from another row, so prompts that are alike are copies; at least
`groups` of the prompts must be known.

## Why it matters
A row that occurs ten times has ten times the weight, and is memorised; where a copy is among the
held-out rows, evaluation measures memory.

## Likely causes
- duplicate-rows: files that were joined twice, or templates filled with the same values.

## What to do
Leave the copies out before training.

## Known false alarms
Rows that are repeated on purpose, to weigh them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(0.1, "Share of copies that is worth knowing.")
    warn_share: float = option(0.5, "Share from which on it is a warning.")
    groups: int = option(4, "Groups of kept completions that are enough to tell.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    known = view.facts.get("duplicate_rows")
    share = float(known) if known is not None else _share_of_samples(view, options)
    if share is None:
        yield Unknown("nothing counted duplicate_rows, and too few completions were kept")
        return
    # Some of the few known prompts may be equal by chance.
    if share <= (options.max_share if known is not None else options.warn_share):
        return
    yield Sighting(
        message=f"{share:.0%} of the rows are copies of others (limit {options.max_share:.0%}): "
        "they are memorised. Leave the copies out.",
        evidence=(f"duplicate_rows {share:.2f}",),
        causes=(Cause("duplicate-rows", f"{share:.0%} of the rows occur before"),),
        fixes=(Fix("data.train", "without copies", "every row has the same weight"),),
        value=share,
        limit=options.max_share,
        level=Level.WARN if share > options.warn_share else None,
    )


def _share_of_samples(view: RunView, options: Options) -> float | None:
    """Return the share of kept groups whose prompt was seen before, without each step's first."""
    size = view.number("rollout.samples_per_prompt")
    if view.framework.name != "homeostat" or not size:
        return None
    steps: dict[int | None, list[str]] = {}
    for sample in view.samples:
        steps.setdefault(sample.step, []).append(sample.prompt)
    # A group has up to `size` completions among those that were kept; the first is no copy.
    others = {step: math.ceil(len(prompts) / size) - 1 for step, prompts in steps.items()}
    num = sum(others.values())
    if num < options.groups:
        return None
    return sum(max(0, others[step] + 1 - len(set(steps[step]))) for step in steps) / num


RULE = Rule(
    code="DAT006",
    name="duplicate-rows",
    family=Family.DATA,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    options=Options,
    explains=("POL015", "RWD001", "DAT010", "LRN001"),
)
