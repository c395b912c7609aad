"""Preference training moves the policy, but the policy prefers the chosen answers no more than
chance.

## What it sees
Over the newest `fire` records the share of pairs that are ordered rightly stays within `margin` of
one half without a rise, while the rewards are no longer 0 (DPO's implicit ones, or those of a
reward model): the model moves, but without effect. Where held-out pairs are evaluated, their share
is near one half, too.

## Why it matters
Nothing can be learned from labels that do not depend on the answers. The updates push the policy in
random directions, and it loses what it knew.

## Likely causes
- preference-labels-noise: chosen and rejected were mixed up in a part of the rows, annotators
  disagree, or both answers of a pair are equally good.

## What to do
Read twenty pairs. Check whether the columns of chosen and rejected are right for every source, and
whether a simple judge agrees with the labels more often than by chance.

## Known false alarms
A rate that is too low shows the same share, but rewards that stay at 0: it is not judged here.
Tasks that are hard to learn take longer than `fire` records.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import is_climbing, needed
from homeostat.health.rules.signs import trend
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    fire: int = option(20, "Number of records that must show it.")
    margin: float = option(0.06, "Distance from one half that is chance.")
    min_reward: float = option(0.01, "Implicit reward from which on the policy has moved.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    share = needed(view, "preference/accuracy").finite()
    if len(share) < options.fire or is_climbing(view):
        return
    late = share.tail(options.fire)
    mean, course = float(late.values.mean()), trend(share)
    if abs(mean - 0.5) > options.margin or (course is not None and course.rises):
        return
    held_out = view.latest("eval/preference_accuracy")
    if held_out is not None and abs(held_out - 0.5) > 2.5 * options.margin:
        return
    sides = [needed(view, f"preference/{side}_reward") for side in ("chosen", "rejected")]
    moved = max(float(np.abs(side.finite().tail(5).values).mean()) for side in sides)
    if not moved > options.min_reward:
        return
    first = int(late.steps[0])
    yield Sighting(
        message=f"The model has moved (it rewards answers with {moved:.2g}), and orders {mean:.0%} "
        f"of the pairs rightly since step {first}, as chance would: the labels say nothing about "
        "the answers. Read some pairs, and see the columns of chosen and rejected.",
        evidence=(
            f"preference/accuracy {mean:.3f} over {len(late)} records",
            f"rewards of chosen and rejected answers {moved:.2g}",
        ),
        causes=(Cause("preference-labels-noise", f"{mean:.0%} of the pairs are ordered rightly"),),
        fixes=(Fix("data.train", "pairs whose labels were checked", "something to learn from"),),
        first_step=first,
        last_step=int(late.steps[-1]),
        value=mean,
        limit=0.5 + options.margin,
    )


RULE = Rule(
    code="LRN029",
    name="preference-labels-noise",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("preference/accuracy", "preference/chosen_reward", "preference/rejected_reward"),
    kinds=(Kind.PREFERENCE,),
    options=Options,
    explains=("LRN004",),
)
