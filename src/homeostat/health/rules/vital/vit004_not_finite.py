"""A vital metric is NaN or infinite: the reward, the KL, the entropy, the loss.

## What it sees
The newest record and two of the last four are not finite; it is a warning if only the newest
record, or the mean loss that a trainer prints at the end, is not finite, and if only gradient norms
are not finite now and then, while every loss is. Of single reward functions only infinite values
count, because some trainers log NaN for a function that does not apply to a batch. If a rule knows
more about a loss or gradient that is not finite, that finding is shown instead.

## Why it matters
Every mean, advantage and update that such a value takes part in is not finite either, or is left
out. A trainer that turns it into 0 continues without learning anything.

## Likely causes
- reward-not-finite: a reward function divides by 0, takes a logarithm of 0, or passes on a NaN.
- nan-loss: loss or gradient, where nothing more is known.
- kl-estimator-overflow: the exponential of a large difference of log-probs.

## What to do
Find the reward function whose own mean is not finite, and call it by hand on an empty and an odd
answer. Return a finite number, or None where it does not apply.

## Known false alarms
None known: a vital metric has to be a number.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule
from homeostat.health.view import RunView
from homeostat.health.vital_signs.metrics import ends_not_finite, not_finite

# Number of newest gradient norms that are all lost if nothing is learned any more.
_LASTING = 10
_CAUSES = {
    "kl": ("kl-estimator-overflow", "the estimate overflows, or the policies differ without bound"),
    "entropy": ("nan-loss", "the logits are not finite"),
}


def check(view: RunView, _: object) -> Iterator[Sighting]:
    names = list(not_finite(view))
    if not names:
        yield from _only_now(view)
        return
    # The reward comes before what is computed from it.
    rewards = [name for name in names if name.startswith("reward")]
    name = (sorted(rewards, key=len, reverse=True) or names)[0]
    series = view.metrics[name]
    bad = np.flatnonzero(~np.isfinite(series.values))
    first = int(series.steps[bad[0]])
    cause, why = (
        ("reward-not-finite", f"{name} is {series.latest}")
        if rewards
        else _CAUSES.get(name, ("nan-loss", f"{name} is {series.latest}"))
    )
    yield Sighting(
        message=f"{name} is {series.latest} since step {first} ({len(bad)} of {len(series)} "
        "records are not finite): nothing can be learned from what is computed with it. "
        + ("Call the reward function by hand on an empty and an odd answer." if rewards else
           "Find its source before you continue the run."),
        evidence=tuple(f"{one} is {view.metrics[one].latest}" for one in names),
        causes=(Cause(cause, why),),
        fixes=(Fix("rewards.functions", "finite numbers, or None", "where it does not apply"),)
        if rewards
        else (),
        first_step=first,
        last_step=int(series.steps[-1]),
        value=series.latest,
        family=Family.REWARD if rewards else None,
        level=Level.WARN if names == ["grad_norm"] and _come_and_go(view) else None,
    )  # fmt: skip


def _come_and_go(view: RunView) -> bool:
    """Return whether some of the newest gradient norms are finite, and all losses are."""
    norm, loss = view.metrics["grad_norm"], view.series("train/loss", "train/policy_loss")
    is_lasting = not np.isfinite(norm.tail(_LASTING).values).any()
    return not is_lasting and loss is not None and bool(np.isfinite(loss.values).all())


def _only_now(view: RunView) -> Iterator[Sighting]:
    """Report a single value that is not finite where the log ends: what follows is not known."""
    names = list(ends_not_finite(view))
    if not names:
        return
    series = view.series(names[0])
    value = series.latest if series is not None else float("nan")
    yield Sighting(
        message=f"{names[0]} is not finite where the log ends. The trainer may skip a single such "
        "value; check whether the next values are finite, and the weights that were saved.",
        evidence=tuple(f"{name} is not finite" for name in names),
        causes=(Cause("nan-loss", "the newest record of the run is not finite"),),
        first_step=view.last_step,
        last_step=view.last_step,
        value=value,
        level=Level.WARN,
        confidence=Confidence.INFERRED,
    )


RULE = Rule(
    code="VIT004",
    name="vital-sign-not-finite",
    family=Family.NUMERICS,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("train/loss|train/policy_loss|grad_norm|reward|kl|entropy|eval/loss",),
    explains=("RWD001", "RWD002", "RWD004", "RWD010", "RWD015"),
    yields_to=("NUM", "DAT001", "LRN005", "RWD011", "RWD012", "POL004", "POL005", "MOE", "ERR"),
)
