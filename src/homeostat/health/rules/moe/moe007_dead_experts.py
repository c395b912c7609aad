"""Experts that no token reaches.

## What it sees
The share of experts without a token in a step (moe/dead_experts) is above `max_share` in the newest
records, and above what it was in the first ones by more than `rise`. A share that was as large from
the start is the model's own on this data, and is only mentioned. So is a rise in updates of RL that
have less than `few_rows` of the rows of the first ones because most answers are right, and one in a
run that has not ended and has fewer than `min_records` records: a fresh router evens out.

## Why it matters
An expert without tokens gets no gradient. The router has no reason to choose it again, so it stays
dead, and the model has lost its parameters. In RL the policy loses what those experts knew.

## Likely causes
- dead-experts: the router has moved: too high a learning rate, a balancing bias that runs away,
  weights of the router that were damaged.
- expert-load-imbalance: few experts take the tokens of the others.

## What to do
Go back to a checkpoint from before, with a lower rate for the router. In SFT a small balancing loss
keeps all experts in use.

## Known false alarms
Steps with few tokens, or prompts that are all alike, do not reach all of 128 experts; that is so
from the first step on.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.moe.routing import few_records, few_rows, first_over, newest
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(0.15, "Largest share of experts that may be without a token.")
    rise: float = option(0.08, "Rise over the first records that is more than noise.")
    few_rows: float = option(0.5, "Share of the first updates' rows that is too few to compare.")
    min_records: int = option(
        12, "Number of records before which a run that has not ended gets no warning."
    )


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    whole, late = (
        needed(view, "moe/dead_experts").finite(),
        newest(view, "moe/dead_experts", count=4),
    )
    if late is None:
        return
    before, now = median(whole.head(3).values), median(late.values)
    if now <= options.max_share:
        return
    has_risen = now - before > options.rise
    few = few_rows(view, int(late.steps[0]), share=options.few_rows)
    early = few_records(view, whole, least=options.min_records)
    limit = max(options.max_share, before + options.rise) if has_risen else options.max_share
    yield Sighting(
        message=f"{now:.0%} of the experts get no token, {before:.0%} in the first records (limit "
        f"{limit:.0%}){few}{early}. They learn nothing, and stay dead.",
        evidence=(f"dead experts {now:.3g}, {before:.3g} in the first records",),
        causes=(
            Cause("dead-experts", f"{now:.0%} of the experts"),
            Cause("expert-load-imbalance", "the others take their tokens"),
        ),
        fixes=(
            Fix("trainer.lr", "a third of it", "the router moves less", Grade.UNSAFE),
            Fix(
                "model.moe.aux_loss_coefficient",
                "0.001",
                "gives every expert tokens; in RL as small as possible",
                Grade.UNSAFE,
            ),
        ),
        first_step=first_over(whole, limit),
        last_step=int(whole.steps[-1]),
        value=now,
        limit=limit,
        level=Level.WARN if has_risen and not few and not early else Level.INFO,
    )


RULE = Rule(
    code="MOE007",
    name="dead-experts",
    family=Family.MOE,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("moe/dead_experts",),
    options=Options,
    explains=("MOE002",),
)
