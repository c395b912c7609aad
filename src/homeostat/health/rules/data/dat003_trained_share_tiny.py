"""Hardly any token has a loss.

## What it sees
`data/trained_share`, the share of tokens with a loss, below `min_share` on average over the newest
records.

## Why it matters
A thousand tokens are computed for each one that is trained. Either prompts are extremely long for
their answers, or the mask covers more than it should.

## Likely causes
- trained-share-tiny: long context, short answers.
- chat-template-mismatch: only the last of several answers is found.

## What to do
Look at a row with its labels (`homeostat inspect`). If the prompts are the same again and again,
shorten them.

## Known false alarms
Classification with one-token answers is so by nature; hence information unless almost nothing
trains.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    min_share: float = option(0.01, "Share of the tokens that should have a loss.")
    warn_share: float = option(0.0005, "Share below which it is a warning.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    trained = needed(view, "data/trained_share").tail(5)
    share = float(trained.values.mean())
    if not 0 < share < options.min_share:
        return
    yield Sighting(
        message=f"Only {share:.2%} of the tokens have a loss (usual: above "
        f"{options.min_share:.0%}). Look at a row with its labels: is the mask right?",
        evidence=(f"data/trained_share {share:.2g}",),
        causes=(Cause("trained-share-tiny", f"{share:.2%} of the tokens have a loss"),),
        fixes=(Fix("model.chat_template", "the model's own", "marks the answers of all turns"),),
        first_step=int(trained.steps[0]),
        last_step=int(trained.steps[-1]),
        value=share,
        limit=options.min_share,
        level=Level.WARN if share < options.warn_share else None,
    )


RULE = Rule(
    code="DAT003",
    name="trained-share-tiny",
    family=Family.DATA,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("data/trained_share",),
    kinds=(Kind.SFT,),
    options=Options,
)
