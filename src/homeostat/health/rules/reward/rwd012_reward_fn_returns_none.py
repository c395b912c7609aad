"""A reward function gives None for every sample.

## What it sees
`rewards/<name>/none` equals the samples of a step (or is above 0 while the function never had a
mean) in `fire` records in a row.

## Why it matters
None means "this reward does not apply to this sample". If it is returned for all samples, the
reward is silently switched off.

## Likely causes
- reward-fn-returns-none: a branch of the function ends without a return statement.
- dataset-column-missing: the function skips samples that lack a column, and no sample has it.

## What to do
Call the function by hand on a row of the data set; look for a branch without a return statement,
and check the column names.

## Known false alarms
A function for one of several tasks, while the batch holds only rows of other tasks.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import samples_per_step
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    fire: int = option(3, "Number of consecutive records that must show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    samples = samples_per_step(view)
    for name, none in view.matching("rewards/", "/none").items():
        mean = view.series(f"rewards/{name}/mean")
        if mean is not None and samples is None:
            continue
        limit = samples if samples is not None else 1.0
        spell = newest_spell(none.values >= limit, fire=options.fire, clear=2)
        if spell is None or not spell.is_open:
            continue
        first = int(none.steps[spell.start])
        yield Sighting(
            message=f"The reward {name} has given None for every sample since step {first}: it has "
            "no part in training. Call it by hand on a row.",
            evidence=(f"rewards/{name}/none {none.latest:.0f} a record",),
            causes=(
                Cause("reward-fn-returns-none", "it returned None for all samples"),
                Cause("dataset-column-missing", "it may look for a column that no row has"),
            ),
            fixes=(
                Fix(
                    "rewards.functions",
                    "a function that returns a number",
                    "None does not count as a reward",
                ),
            ),
            first_step=first,
            last_step=int(none.steps[spell.end]),
            value=none.latest,
            limit=limit,
            subject=name,
        )


RULE = Rule(
    code="RWD012",
    name="reward-fn-returns-none",
    family=Family.REWARD,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("RWD001", "RWD002", "RWD004"),
)
