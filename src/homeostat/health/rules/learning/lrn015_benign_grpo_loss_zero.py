"""The printed RL loss is 0, and everything else shows that the run learns.

## What it sees
A loss of at most `max_loss` in every record, with a gradient norm above 0 and rewards that differ
within a group.

## Why it matters
Group-relative advantages sum to 0, and on the first update every ratio is 1: the loss is 0 by
construction, while its gradient is not. The loss says nothing about learning.

## Likely causes
- benign-grpo-loss-zero: this follows from the definition of the loss.

## What to do
Nothing. Follow the reward, its deviation, the KL and the gradient norm.

## Known false alarms
None known: the finding only says that the number means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_loss: float = option(5e-5, "Loss that prints as 0.")
    min_records: int = option(4, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    loss, norm = needed(view, "train/loss"), needed(view, "grad_norm")
    spread = needed(view, "reward_std", "advantages/std")
    if len(loss) < options.min_records or float(np.nanmax(np.abs(loss.values))) > options.max_loss:
        return
    moving = float(np.mean(norm.values > 0)), float(np.mean(spread.values > 0))
    if min(moving) < 0.5:
        return
    yield Sighting(
        message=f"The loss is 0 in print because advantages sum to 0 within a group; the gradient "
        f"norm ({float(np.nanmedian(norm.values)):.3g}) and the rewards' deviation "
        f"({float(np.nanmedian(spread.values)):.3g}) show that the run learns. Nothing to do.",
        evidence=(f"grad_norm above 0 in {moving[0]:.0%} of the records",),
        causes=(Cause("benign-grpo-loss-zero", "the loss is 0 by construction"),),
        first_step=int(loss.steps[0]),
        last_step=int(loss.steps[-1]),
    )


RULE = Rule(
    code="LRN015",
    name="benign-grpo-loss-zero",
    family=Family.LEARNING,
    level=Level.INFO,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("train/loss", "grad_norm", "reward_std|advantages/std"),
    kinds=(Kind.RL,),
    options=Options,
)
