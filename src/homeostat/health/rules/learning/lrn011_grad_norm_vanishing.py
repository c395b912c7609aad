"""The gradient norm falls to almost nothing while the loss is still high.

## What it sees
The newest norms are below `share` of the first ones, the loss (SFT) has not fallen below half of
what it was, and the learning rate did not fall to nothing with them.

## Why it matters
Learning has stopped. In SFT a gradient shrinks as the loss nears its floor, not before.

## Likely causes
- grad-norm-vanishing: saturated activations, a mask that covers more and more of the rows.
- trained-share-tiny: by now hardly any token has a loss.

## What to do
Look at the share of tokens that have a loss, and at the rows of the newest steps.

## Known false alarms
A loss that is not small but cannot get lower on this data.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, needed, prints_zero
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    share: float = option(1e-3, "Share of the first norms below which they have vanished.")
    min_records: int = option(12, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    norm, loss = needed(view, "grad_norm"), needed(view, "train/loss")
    norm, loss = norm.finite(), loss.finite()
    if min(len(norm), len(loss)) < options.min_records or prints_zero(view, "grad_norm"):
        return
    first, last = ends(norm)
    before, now = ends(loss)
    gone = norm.values < options.share * first
    if first <= 0 or last <= 0 or last > options.share * first or now < max(0.5 * before, 0.3):
        return
    start = int(norm.steps[np.flatnonzero(~gone)[-1] + 1]) if gone[-1] else int(norm.steps[-1])
    trained = view.latest("data/trained_share")
    causes = [Cause("grad-norm-vanishing", "the norm falls while the loss stays")]
    if trained is not None and trained < 0.01:
        causes.insert(0, Cause("trained-share-tiny", f"{trained:.2%} of the tokens have a loss"))
    yield Sighting(
        message=f"The gradient norm fell from {first:.3g} to {last:.3g} while the loss is still "
        f"{now:.3g}: nothing is learned any more since about step {start}. Look at the newest "
        "rows and at which of their tokens have a loss.",
        evidence=(f"grad_norm {first:.3g} -> {last:.3g}", f"train/loss {before:.3g} -> {now:.3g}"),
        causes=tuple(causes),
        fixes=(Fix("", "look at the newest rows", "see which of their tokens have a loss"),),
        first_step=start,
        last_step=int(norm.steps[-1]),
        value=last,
        limit=options.share * first,
    )


RULE = Rule(
    code="LRN011",
    name="grad-norm-vanishing",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("grad_norm", "train/loss"),
    kinds=(Kind.SFT,),
    options=Options,
)
