"""The RL loss rises because it is the KL penalty, while the reward gets better.

## What it sees
The loss rises and is proportional to the KL over the records (correlation above `correlation`),
the KL is moderate, and the reward does not fall.

## Why it matters
Advantages are centred, so the loss is only coefficient times KL. The KL rises as the policy moves
away from its reference, which any learning does.

## Likely causes
- benign-loss-tracks-kl: the loss is the penalty.

## What to do
Nothing while the KL stays below about 0.5. Judge the run by reward and KL.

## Known false alarms
A KL that runs away looks the same at first; that case has its own rule.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, needed, rank_correlation
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    correlation: float = option(0.9, "Correlation of loss and KL that is a proportion.")
    max_kl: float = option(0.5, "KL up to which this is harmless.")
    min_records: int = option(6, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    loss, far, reward = needed(view, "train/loss"), needed(view, "kl"), needed(view, "reward")
    loss, far = loss.finite().on(far.finite())
    if len(loss) < options.min_records or np.ptp(loss.values) == 0 or np.ptp(far.values) == 0:
        return
    together = float(np.corrcoef(loss.values, far.values)[0, 1])
    if together < options.correlation or far.latest > options.max_kl:
        return
    if rank_correlation(loss) <= 0.6:
        return
    first, last = ends(reward.finite())
    if last < first - 0.02 * abs(first):
        return
    yield Sighting(
        message=f"The loss rises to {loss.latest:.3g} because it is the KL penalty (correlation "
        f"{together:.2f}); the KL is {far.latest:.3g} and the reward goes from {first:.3g} to "
        f"{last:.3g}. Nothing to do.",
        evidence=(f"loss / KL = {loss.latest / max(far.latest, 1e-12):.3g}",),
        causes=(Cause("benign-loss-tracks-kl", "the loss is coefficient times KL"),),
        first_step=int(loss.steps[0]),
        last_step=int(loss.steps[-1]),
    )


RULE = Rule(
    code="LRN016",
    name="benign-loss-tracks-kl",
    family=Family.LEARNING,
    level=Level.INFO,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("train/loss", "kl", "reward"),
    kinds=(Kind.RL,),
    options=Options,
)
